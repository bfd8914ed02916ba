"""Quantize a model one decoder layer after another, with inputs from the quantized layers before.

The modules are transformers modules, in float32, one layer at a time. So any decoder works whose
layers are in a list and whose linear layers have the names of the checkpoint.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from vllm.errors import ConfigError

_SAMPLE_ROWS = 2048
"""Number of rows of the inputs of a layer that are kept as they are."""


@dataclass
class Inputs:
    """Statistics of the inputs of a linear layer."""

    hessian: Tensor
    """[in, in] x.T @ x"""
    rows: list[Tensor] = field(default_factory=list)
    """Some of the inputs."""

    def add(self, x: Tensor) -> None:
        """Add inputs [tokens, in] to the statistics."""
        self.hessian.addmm_(x.T, x)
        room = _SAMPLE_ROWS - sum(map(len, self.rows))
        if room > 0:
            self.rows.append(x[:room].clone())


QuantizeLayer = Callable[[str, nn.Module, dict[str, Inputs]], None]
"""Replaces a layer's weights by rounded ones: called with the name of a decoder layer, the layer,
and inputs of its linear layers by their names in it."""


@torch.no_grad()
def quantize_layers(
    model: nn.Module, samples: Sequence[Sequence[int]], quantize: QuantizeLayer
) -> None:
    """Call `quantize` for every decoder layer.

    Args:
        model: a causal transformers model.
        samples: token ids, all of the same length.
        quantize: rounds one layer.

    Raises:
        ConfigError: the model has no list of decoder layers.
    """
    path, layers = decoder_layers(model)
    hidden, keywords = _first_inputs(model, layers, samples)
    for index, layer in enumerate(tqdm(layers, desc="Quantizing layers")):
        dtype = next(layer.parameters()).dtype
        layer.float()
        inputs: dict[str, Inputs] = {}
        with _recording(layer, inputs):
            for x in hidden:
                layer(x, **keywords[index])
        quantize(f"{path}.{index}", layer, inputs)
        del inputs
        hidden = [_first(layer(x, **keywords[index])) for x in hidden]
        layer.to(dtype)


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the name of the module list with the most parameters, and the list.

    Raises:
        ConfigError: the model has no module list.
    """
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise ConfigError(f"{type(model).__name__} has no list of decoder layers to quantize")
    return max(lists, key=lambda each: sum(p.numel() for p in each[1].parameters()))


def linear_layers(layer: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers inside a module, with their names."""
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            yield name, module


def _first_inputs(
    model: nn.Module, layers: nn.ModuleList, samples: Sequence[Sequence[int]]
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Return the inputs of the first layer for each sample, and the keyword arguments of each
    layer, which are the same for all samples.
    """
    hidden: list[Tensor] = []
    keywords: list[dict[str, Any]] = []

    def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if layer is layers[0]:
            hidden.append(args[0].float())
            if len(hidden) > 1:
                raise _EnoughError
        keywords.append({name: _as_float(value) for name, value in kwargs.items()})

    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    for sample in samples:
        try:
            model(torch.tensor([list(sample)]), use_cache=False)
        except _EnoughError:
            continue
    for hook in hooks:
        hook.remove()
    return hidden, keywords


class _EnoughError(Exception):
    """Raised when the wanted inputs are recorded, because the rest of the model need not run."""


def _as_float(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.float()
    if isinstance(value, (tuple, list)):
        return type(value)(_as_float(each) for each in value)
    return value


def _first(outputs: Any) -> Tensor:
    return outputs[0] if isinstance(outputs, tuple) else outputs


class _recording:
    """Records the inputs of all linear layers in a layer while the context is open. Layers with the
    same inputs share an entry.
    """

    def __init__(self, layer: nn.Module, inputs: dict[str, Inputs]) -> None:
        self.layer = layer
        self.inputs = inputs
        self.last: tuple[Tensor, Inputs] | None = None
        self.hooks: list[Any] = []

    def __enter__(self) -> None:
        for name, linear in linear_layers(self.layer):
            self.hooks.append(linear.register_forward_pre_hook(self._hook(name)))

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def add(linear: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0]
            if self.last is not None and self.last[0] is x:
                self.inputs[name] = self.last[1]
                return
            num_in = x.shape[-1]
            known = self.inputs.setdefault(name, Inputs(torch.zeros(num_in, num_in)))
            known.add(x.reshape(-1, num_in))
            self.last = x, known

        return add
