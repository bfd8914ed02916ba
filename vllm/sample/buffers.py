"""Memory for temporaries that is used again."""

import math

import torch
from torch import Tensor


class Buffers:
    """Named float32 buffers that grow to the largest use and are then kept.

    A temporary of some megabytes is new memory from the system each time on a CPU, and to have its
    pages mapped takes as long as to compute it. Whoever takes a name owns that buffer until the
    name is taken again.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """An uninitialised tensor of this shape; what the name held before is lost."""
        size = math.prod(shape)
        memory = self._memory.get(name)
        if memory is None or memory.numel() < size or memory.device != device:
            memory = torch.empty(size, dtype=torch.float32, device=device)
            self._memory[name] = memory
        return memory[:size].view(shape)

    def take_like(self, name: str, values: Tensor) -> Tensor:
        """An uninitialised tensor of the shape and on the device of another."""
        return self.take(name, tuple(values.shape), values.device)
