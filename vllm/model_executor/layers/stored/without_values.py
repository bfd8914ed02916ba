"""Copies finished layers for plans of memory: the copies have the sizes, but no values."""

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn


def without_values(
    module: nn.Module,
    device: torch.device,
    larger: nn.Module | None = None,
    growth: int = 0,
    shared: dict[int, Tensor] | None = None,
) -> Any:
    """Return a copy of a module with uninitialised parameters and buffers.

    Args:
        module: module to copy.
        device: device of the copy.
        larger: a module of the same structure, whose shapes and integer attributes may be larger;
            None: `module`.
        growth: how many times the difference between `larger` and `module` is added to the shapes
            and integer attributes of `module`.
        shared: id of a tensor of `module` -> the tensor that the copy has instead. Filled with the
            other tensors, so tensors that occur twice are shared in the copy as well.
    """
    larger = module if larger is None else larger
    shared = {} if shared is None else shared

    def grown(first: int, second: int) -> int:
        return first + growth * (second - first)

    def like(x: Any, y: Any) -> Any:
        if x is None:
            return None
        if id(x) not in shared:
            sizes = [grown(*both) for both in zip(x.shape, y.shape, strict=True)]
            new = torch.empty(sizes, dtype=x.dtype, device=device)
            is_parameter = isinstance(x, nn.Parameter)
            shared[id(x)] = nn.Parameter(new, requires_grad=False) if is_parameter else new
        return shared[id(x)]

    new: Any = copy(module)
    new.__dict__ |= {
        name: grown(value, getattr(larger, name))
        for name, value in vars(module).items()
        if type(value) is int
    }
    new._parameters = {x: like(p, larger._parameters[x]) for x, p in module._parameters.items()}
    new._buffers = {x: like(b, larger._buffers[x]) for x, b in module._buffers.items()}
    new._modules = {
        name: part and without_values(part, device, larger._modules[name], growth, shared)
        for name, part in module._modules.items()
    }
    return new
