"""Share memory between temporary tensors."""

import math
from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

ToDevice = Callable[[npt.NDArray[Any]], Tensor]
"""Copies an array to the device of the logits."""


class Buffers:
    """Named float32 buffers. Each grows to its largest use and is kept.

    On a CPU, a new temporary tensor of some megabytes is new memory from the system each time, and
    mapping its pages takes as long as computing it. A tensor from a buffer is valid until the next
    call with the same name.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return an uninitialised tensor of this shape, in the buffer of this name."""
        size = math.prod(shape)
        memory = self._memory.get(name)
        if memory is None or memory.numel() < size or memory.device != device:
            memory = torch.empty(size, dtype=torch.float32, device=device)
            self._memory[name] = memory
        return memory[:size].view(shape)

    def get_like(self, name: str, values: Tensor) -> Tensor:
        """Return an uninitialised tensor with the shape and device of another one."""
        return self.get(name, tuple(values.shape), values.device)
