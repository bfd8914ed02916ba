"""Finishes the layers of a model once their parameters are filled.

For plans of memory there are no values: layers with equal shapes are then finished only once.
"""

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import nn

from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.linear import ParallelLinear
from vllm.model_executor.layers.stored.stored_experts import DeviceExperts
from vllm.model_executor.layers.stored.stored_linear import KeepsPacked
from vllm.model_executor.layers.stored.without_values import without_values
from vllm.model_executor.layers.weight_method import MethodLayer

MAX_BUILT = 2
"""Experts of a layer that a plan of memory builds; the sizes of more experts follow from these."""


class LayerFinisher:
    """Finishes each layer of a model exactly once.

    Args:
        model: whose layers to finish.
    """

    def __init__(self, model: nn.Module) -> None:
        self._finished: set[MethodLayer] = set()
        self._owners: dict[nn.Module, nn.Module] = {}
        """Layer that another layer takes over -> that other layer."""
        self._waiting: dict[nn.Module, set[nn.Module]] = {}
        """Layer that takes over others -> the layers that must be filled before it is finished."""
        for layer in model.modules():
            parts = [part for part in layer.modules() if isinstance(part, MethodLayer)]
            held = [part for part in parts if part.is_held and part is not layer]
            if isinstance(layer, MethodLayer) and held:
                self._owners |= dict.fromkeys(held, layer)
                has_own = next(layer.parameters(recurse=False), None) is not None
                self._waiting[layer] = {*held, layer} if has_own else set(held)

    def finish_filled(self, module: nn.Module) -> None:
        """Note that the module's own parameters are filled, and finish it.

        A module that takes over other modules is finished when those are filled as well.
        """
        owner = self._owners.get(module, module)
        waiting = self._waiting.get(owner, set())
        waiting.discard(module)
        if not waiting:
            self.finish(owner)

    def finish(self, module: nn.Module) -> None:
        """Finish a module after its parameters and the parameters of its submodules are filled."""
        if isinstance(module, MethodLayer) and module not in self._finished:
            self._finished.add(module)
            module.finish()


class FinisherWithoutValues(LayerFinisher):
    """Finishes layers that have memory but no values.

    Of the quantized layers with the same shapes, which are finished on the host, only the first one
    is computed; the others get memory of the same shapes. A layer of experts that are alike is
    computed with one expert and with two: the sizes of more experts follow from these.

    Args:
        model: whose layers to finish.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._first: dict[Hashable, KeepsPacked] = {}
        self._few_experts: dict[Hashable, tuple[Experts, Experts]] = {}
        """Kind of a layer -> finished layers with one such expert, and with two; on the meta
        device."""

    def finish(self, module: nn.Module) -> None:
        """Finish the module, or copy the memory layout of a finished one with the same shapes."""
        if not isinstance(module, MethodLayer) or module in self._finished:
            return
        method = module.method
        # A module that overrides `finish` does more than its method, so shapes are not enough.
        is_usual = type(module).finish is MethodLayer.finish
        if isinstance(module, Experts) and isinstance(method, DeviceExperts):
            self._finish_experts(module, method)
            return
        if not isinstance(module, ParallelLinear) or not isinstance(method, KeepsPacked):
            if not (is_usual and method.finish_on_shapes(module)):
                super().finish(module)
            self._finished.add(module)
            return
        self._finished.add(module)
        if module.is_held:
            return
        key = (type(method), *_shapes_of(module.named_parameters(recurse=False)))
        first = self._first.get(key) if is_usual else None
        if first is not None:
            method.finish_like(module, first)
            return
        if is_usual and method.finish_on_shapes(module):
            self._first[key] = method
            return
        _fill_with_valid_values(module)
        module.finish()
        if is_usual:
            self._first[key] = method

    def _finish_experts(self, layer: Experts, method: DeviceExperts) -> None:
        self._finished.add(layer)
        held = [x for x in layer.modules() if isinstance(x, MethodLayer) and x is not layer]
        if len(layer.built_ids) > MAX_BUILT:
            for part in held:
                _fill_with_valid_values(part)
            layer.finish()
            return
        methods = [type(method), *(type(part.method) for part in held)]
        shapes = _shapes_of(layer.named_parameters())
        key = (layer.options, len(layer.expert_ids), *methods, *shapes)
        few = self._few_experts.get(key)
        if few is None:
            for part in held:
                _fill_with_valid_values(part)
            few = _finished_part(layer, 1), _finished_part(layer, len(layer.built_ids))
            self._few_experts[key] = few
        method.finish_like(layer, *few)


def _fill_with_valid_values(layer: MethodLayer) -> None:
    """Fill the parameters of a layer with values that a checkpoint may have."""
    for name, param in layer.named_parameters(recurse=False):
        # A scale of 0 would be refused. Values are copied from the host, as from a checkpoint:
        # computing them would need workspace on the card.
        value = torch.ones if "scale" in name else torch.zeros
        param.copy_(value((), dtype=param.dtype).expand(param.shape))
    layer.method.fill_indices(layer)


def _shapes_of(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[Hashable]:
    return [(name, param.shape, param.dtype) for name, param in parameters]


def _finished_part(layer: Experts, count: int) -> Experts:
    """Finish some experts of a layer, and return a copy of the result on the meta device."""
    part = layer.of_first(count)
    part.finish()
    copied: Any = without_values(part, torch.device("meta"))
    if isinstance(copied.method.packed, nn.Module):
        copied.method.packed = copied.packed
    return copied
