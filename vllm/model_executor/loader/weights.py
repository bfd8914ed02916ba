"""The only loader: fill every parameter of a model from checkpoint tensors, exactly once.

Where a tensor belongs is data: module names, the layers' slices, and the renames of the model
class. Independent of files.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from vllm.distributed import TPGroup
from vllm.errors import WeightLoadError
from vllm.model_executor.layers.slice import Place, SlicedModule, Source
from vllm.model_executor.layers.weight_method import MethodLayer
from vllm.model_executor.loader.kv_scales import load_kv_scale
from vllm.model_executor.models.interface import LoadableModel
from vllm.transformers_utils.weight_files import name_some


@dataclass
class _Targets:
    """What a checkpoint has to bring."""

    by_name: dict[str, Place] = field(default_factory=dict)
    aliases: set[str] = field(default_factory=set)
    """Other names of tied parameters: a checkpoint may hold them, and they are not read."""


ModuleHook = Callable[[nn.Module], None]


@torch.no_grad()
def load_weights(
    model: LoadableModel,
    tensors: Iterable[tuple[str, Source]],
    tp: TPGroup,
    *,
    prepare: ModuleHook = lambda module: None,
    finish: ModuleHook = lambda module: None,
) -> None:
    """Fill every parameter of `model`, converting to its dtype.

    Args:
        model: whose parameters have memory, or get it from `prepare`.
        tensors: of the checkpoint, by their names there.
        tp: the ranks that share the model.
        prepare: called before each tensor with the module whose parameter it fills.
        finish: called with each module that has parameters of its own, once they are filled; it
            may put others in their place. A parameter that two modules share belongs to the first.

    Raises:
        WeightLoadError: a tensor has the wrong shape, comes twice or has no place, or a
            parameter stays empty. Names the tensors.
    """
    targets = _find_targets(model)
    todo = dict(targets.by_name)
    unexpected = []
    num_empty = Counter(target.module for target in todo.values())
    for checkpoint_name, name, source in _converted(tensors, model):
        if name in targets.aliases:
            continue
        if load_kv_scale(model, name, source):
            continue
        target = todo.pop(name, None)
        if target is None:
            unexpected.append(checkpoint_name)
            continue
        prepare(target.module)
        if isinstance(target.module, MethodLayer):
            target.module.load(target, checkpoint_name, source, tp)
        else:
            target.fill(checkpoint_name, source, tp)
        num_empty[target.module] -= 1
        if not num_empty[target.module]:
            finish(target.module)
    problems = [
        f"{len(names)} {what}: {name_some(sorted(names))}"
        for names, what in (
            (list(todo), "tensors missing from the checkpoint"),
            (unexpected, "tensors unknown to the model or given twice"),
        )
        if names
    ]
    if problems:
        raise WeightLoadError(
            f"checkpoint and {type(model).__name__} do not match: {'; '.join(problems)}"
        )


def _converted(
    tensors: Iterable[tuple[str, Source]], model: LoadableModel
) -> Iterator[tuple[str, str, Source]]:
    """Name in the checkpoint, name in the model, tensor; without what is ignored."""
    for checkpoint_name, whole in tensors:
        if not checkpoint_name.endswith(model.ignored_tensors):
            for name, source in model.convert(renamed(checkpoint_name, model), whole):
                yield checkpoint_name, name, source


def renamed(name: str, model: LoadableModel) -> str:
    """The name in the model of what has this name in a checkpoint."""
    for prefix, replacement in model.checkpoint_prefixes.items():
        if name.startswith(prefix):
            name = replacement + name.removeprefix(prefix)
            break
    for part, replacement in model.checkpoint_names.items():
        name = name.replace(part, replacement)
    return name


def _find_targets(model: LoadableModel) -> _Targets:
    targets = _Targets()
    seen: set[int] = set()
    for path, module in model.named_modules():
        slices = module.slices if isinstance(module, SlicedModule) else {}
        for param_name, param in module.named_parameters(recurse=False):
            is_alias = id(param) in seen
            seen.add(id(param))
            for part_name, slice_ in slices.get(param_name, {"": None}).items():
                tensor = (slice_ and slice_.tensor) or param_name
                name = checkpoint_name(path, part_name, tensor)
                if is_alias:
                    targets.aliases.add(name)
                else:
                    targets.by_name[name] = Place(module, param_name, slice_)
    return targets


def checkpoint_name(path: str, part_name: str, tensor: str) -> str:
    """Packed parts are siblings: qkv_proj of a.b packs a.b.q_proj, a.b.k_proj, a.b.v_proj."""
    if part_name:
        parent = path.rpartition(".")[0]
        path = f"{parent}.{part_name}" if parent else part_name
    return f"{path}.{tensor}" if path else tensor
