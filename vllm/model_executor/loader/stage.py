"""Removes from a model the modules that other pipeline stages run.

They take no memory, and their tensors in the checkpoint are not read.
"""

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn

from vllm.distributed import Stage
from vllm.model_executor.layers.embedding import VocabParallelEmbedding
from vllm.model_executor.models.interface import LayeredModel, LoadableModel


class PPMissingLayer(nn.Module):
    """Replaces a module that another pipeline stage runs, so that names and indices stay
    the same.
    """

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("this module is on another stage of the pipeline")


def keep_stage(model: LayeredModel, stage: Stage, *, last_embeds: bool = False) -> None:
    """Replace the modules that the stage does not run by `PPMissingLayer`.

    Args:
        model: the model on the meta device, without memory.
        stage: the stage to keep.
        last_embeds: the last stage keeps the embedding as well, for a speculator.
    """
    model.stage = stage
    if stage.count == 1:
        return
    first, last = model.modules_around_layers()
    dropped = [
        layer
        for index, layer in enumerate(model.layers)
        if not stage.first_layer <= index < stage.end_layer
    ]
    if not stage.is_first and not (stage.is_last and last_embeds):
        # A tied output head shares its parameters with the embedding, so these must stay.
        shared = _parameter_ids(last) if stage.is_last else set()
        dropped += [module for module in first if shared.isdisjoint(_parameter_ids([module]))]
    if not stage.is_last:
        dropped += last
        of_head = _parameter_ids(last)
        for module in first:
            if isinstance(module, VocabParallelEmbedding):
                module.is_head_elsewhere = not of_head.isdisjoint(_parameter_ids([module]))
    ids = {id(module) for module in dropped}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in ids:
                setattr(parent, name, PPMissingLayer())


def present_layers(model: LoadableModel) -> list[nn.Module]:
    """Return the layers that this rank runs, in their order."""
    return [layer for layer in model.layers if not isinstance(layer, PPMissingLayer)]


def absent_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Return the name prefixes of all modules that other stages run."""
    return tuple(
        f"{path}." for path, module in model.named_modules() if isinstance(module, PPMissingLayer)
    )


def _parameter_ids(modules: Iterable[nn.Module]) -> set[int]:
    return {id(param) for module in modules for param in module.parameters()}
