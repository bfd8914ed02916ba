"""Where a checkpoint tensor lands in a parameter, as data.

A layer states it once, per parameter and checkpoint name; one loader reads it for every model.
Knows no files and no names of models.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.distributed import TPGroup


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor that may still be on disk."""

    shape: torch.Size
    read: Callable[[tuple[slice, ...]], Tensor]
    """Index -> that part; nothing else is read. () is the whole tensor."""

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """The part [start, start + length) of one dimension."""
        return self.read((slice(None),) * dim + (slice(start, start + length),))


@dataclass(frozen=True)
class Slice:
    """Rows (dim 0) or columns (dim 1) of a parameter that one checkpoint tensor fills."""

    dim: int
    offset: int
    """First index in this rank's parameter."""
    size: int
    """Indices in this rank's parameter."""
    total: int
    """Indices in the checkpoint tensor; below size * ranks when the last ranks hold padding."""
    num_replicas: int = 1
    """Ranks that hold the same shard; above 1 when there are fewer KV heads than ranks."""

    def checkpoint_shape(self, param: Tensor) -> torch.Size:
        """Shape the checkpoint tensor must have."""
        shape = list(param.shape)
        shape[self.dim] = self.total
        return torch.Size(shape)

    def copy(self, param: Tensor, source: Source, tp: TPGroup) -> None:
        """Fill this rank's part of `param`, converting to its dtype; padding becomes zero."""
        start = min(tp.rank // self.num_replicas * self.size, self.total)
        num_real = min(self.size, self.total - start)
        shard = param.narrow(self.dim, self.offset, self.size)
        if num_real:
            shard.narrow(self.dim, 0, num_real).copy_(source.narrow(self.dim, start, num_real))
        if num_real < self.size:
            shard.narrow(self.dim, num_real, self.size - num_real).zero_()


WeightSlices = dict[str, dict[str, Slice]]
"""Parameter name -> name of the checkpoint module, "" for the layer's own -> its place."""


class SlicedModule(torch.nn.Module):
    """A layer with parameters that are packed or split over ranks.

    A parameter without an entry in `slices` is filled whole by the tensor of its own name.
    """

    slices: WeightSlices

    def __init__(self) -> None:
        super().__init__()
        self.slices = {}
