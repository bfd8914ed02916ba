"""Where a checkpoint tensor lands in a parameter, as data.

A layer states it once, per parameter and checkpoint name; one loader reads it for every model.
Independent of files and names of models.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm.distributed import TPGroup
from vllm.errors import WeightLoadError

Index = tuple[slice, ...]
"""Part of a tensor: a slice without a step for each of the first dimensions; () is all of it."""


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor that may still be on disk."""

    shape: torch.Size
    read: Callable[[Index], Tensor]
    """Index -> that part; nothing else is read."""
    copy_to: Callable[[Tensor, Index], None] | None = None
    """Read that part into a tensor of its shape, without a copy on the way where that can be."""

    def rows(self, start: int, count: int) -> "Source":
        """Rows [start, start + count) as a tensor of their own."""

        def read(index: Index) -> Tensor:
            first, end, _ = (index[0] if index else slice(None)).indices(count)
            return self.read((slice(start + first, start + end), *index[1:]))

        return Source(torch.Size((count, *self.shape[1:])), read)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Source":
        """What `function` makes of the tensor, whose whole is read for every part."""
        shape = function(torch.empty(self.shape, device="meta")).shape
        return Source(shape, lambda index: function(self.read(()))[index])

    def fill(self, target: Tensor, index: Index = ()) -> None:
        """Copy that part into `target`, of its shape, converting to its dtype."""
        if self.copy_to is None:
            target.copy_(self.read(index))
        else:
            self.copy_to(target, index)


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
    tensor: str | None = None
    """Last part of the name in the checkpoint; None: that of the parameter."""

    def checkpoint_shape(self, param: Tensor) -> torch.Size:
        """Shape the checkpoint tensor must have."""
        shape = list(param.shape)
        shape[self.dim] = self.total
        return torch.Size(shape)

    def in_groups(self, group: int) -> "Slice":
        """The same place in a parameter with one column for each `group` columns."""
        if self.dim == 0:
            return self
        offset, size, total = (n // group for n in (self.offset, self.size, self.total))
        return replace(self, offset=offset, size=size, total=total)

    def copy(self, param: Tensor, source: Source, tp: TPGroup) -> None:
        """Fill this rank's part of `param`, converting to its dtype; padding becomes zero."""
        start = min(tp.rank // self.num_replicas * self.size, self.total)
        num_real = min(self.size, self.total - start)
        shard = param.narrow(self.dim, self.offset, self.size)
        if num_real:
            part = (slice(None),) * self.dim + (slice(start, start + num_real),)
            source.fill(shard.narrow(self.dim, 0, num_real), part)
        if num_real < self.size:
            shard.narrow(self.dim, num_real, self.size - num_real).zero_()


def whole(dim: int, offset: int, size: int, tp: TPGroup) -> Slice:
    """Rows or columns of a parameter that a checkpoint tensor fills alike on every rank."""
    return Slice(dim, offset, size, size, num_replicas=tp.size)


@dataclass(frozen=True, kw_only=True)
class ExpertSlice(Slice):
    """Rows or columns of one expert's matrix in a parameter [experts, ...]."""

    expert: int

    def checkpoint_shape(self, param: Tensor) -> torch.Size:
        return super().checkpoint_shape(param[self.expert])

    def copy(self, param: Tensor, source: Source, tp: TPGroup) -> None:
        super().copy(param[self.expert], source, tp)


WeightSlices = dict[str, dict[str, Slice]]
"""Parameter name -> name of the checkpoint module, "" for the layer's own -> its place."""


class SlicedModule(torch.nn.Module):
    """A layer with parameters that are packed or split over ranks.

    A parameter without an entry in `slices` is filled whole by the tensor of its own name.
    """

    slices: WeightSlices

    elsewhere: frozenset[str] = frozenset()
    """Names of parts of the module that only other ranks have."""

    def __init__(self) -> None:
        super().__init__()
        self.slices = {}


@dataclass(frozen=True)
class Place:
    """Where a checkpoint tensor goes."""

    module: torch.nn.Module
    param_name: str
    slice: Slice | None
    """Part of the parameter; None: all of it."""

    @property
    def param(self) -> Tensor:
        """The whole parameter."""
        param: Tensor = getattr(self.module, self.param_name)
        return param

    def fill(self, name: str, source: Source, tp: TPGroup) -> None:
        """Copy this rank's part of a tensor, converting to the dtype of the parameter.

        Raises:
            WeightLoadError: it has another shape.
        """
        param = self.param
        expected = self.slice.checkpoint_shape(param) if self.slice else param.shape
        if source.shape != expected:
            raise WeightLoadError(
                f"tensor {name} has shape {list(source.shape)} in the checkpoint, "
                f"the model needs {list(expected)}"
            )
        if self.slice is None:
            source.fill(param)
        else:
            self.slice.copy(param, source, tp)
