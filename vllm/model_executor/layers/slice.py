"""Describes, as data, which part of a parameter a checkpoint tensor fills.

A layer declares it once for each parameter and checkpoint name; one loader reads the declarations
of all models. Independent of files and module names of models.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from vllm.distributed import TPGroup, divide
from vllm.errors import WeightLoadError

Index = tuple[slice, ...]
"""Part of a tensor: a slice without a step for each of the first dimensions; () is all of it."""

DENSE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Data types of weights that are not quantized."""

WORD_BITS = 32
"""Bits of a word in which formats pack values of few bits."""


@dataclass(frozen=True)
class Features:
    """Selects the output features of one part of a layer, when a checkpoint stores several as one.

    In each group of features the part has `count` consecutive ones.
    """

    total: int
    """Size of the whole layer."""
    group: int
    """Number of neighbouring features in a group."""
    start: int
    """Index of the first feature of the part in a group."""
    count: int
    """Number of features of the part in a group."""

    @property
    def size(self) -> int:
        """Number of features of the part."""
        return self.total // self.group * self.count

    def in_words(self, bits: int) -> "Features | None":
        """Return the same selection counted in 32-bit words; None if the values do not fill whole
        words.
        """
        sizes = [n * bits for n in (self.total, self.group, self.start, self.count)]
        if any(size % WORD_BITS for size in sizes):
            return None
        return Features(*(size // WORD_BITS for size in sizes))


@dataclass(frozen=True)
class CheckpointTensor:
    """A checkpoint tensor that may still be on disk."""

    shape: torch.Size
    read: Callable[[Index], Tensor]
    """Index -> that part; nothing else is read."""
    copy_to: Callable[[Tensor, Index], None] | None = None
    """Read that part into a tensor of its shape, without a copy on the way where that can be."""
    dtype: torch.dtype | None = None
    """Data type in the checkpoint; None: unknown."""
    features: Features | None = None
    """The output features of a layer to which this is limited. The format of the layer knows where
    they are in the tensor, and passes this to `picked`."""
    path: Path | None = None
    """Path of the file that contains the tensor, for errors; None: unknown."""
    is_converted: bool = False
    """Name and layout are as in the model, not as in a checkpoint of the family."""

    def narrow(self, dim: int, start: int, count: int) -> "CheckpointTensor":
        """Return the part [start, start + count) of a dimension, as a tensor."""

        def read(index: Index) -> Tensor:
            inner = [*index, *(slice(None) for _ in range(dim + 1 - len(index)))]
            first, end, _ = inner[dim].indices(count)
            inner[dim] = slice(start + first, start + max(first, end))
            return self.read(tuple(inner))

        shape = torch.Size((*self.shape[:dim], count, *self.shape[dim + 1 :]))
        return CheckpointTensor(
            shape, read, dtype=self.dtype, features=self.features, path=self.path
        )

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "CheckpointTensor":
        """Return a tensor that reads the whole tensor and applies `function` to it."""
        made = function(torch.empty(self.shape, dtype=self.dtype, device="meta"))
        return CheckpointTensor(
            made.shape,
            lambda index: function(self.read(()))[index],
            dtype=self.dtype and made.dtype,
            features=self.features,
            path=self.path,
        )

    def made(
        self, shape: torch.Size, dtype: torch.dtype, function: Callable[[Tensor], Tensor]
    ) -> "CheckpointTensor":
        """Return a tensor of this shape and dtype that applies `function` to the values when it is
        read.
        """
        return CheckpointTensor(
            shape,
            lambda index: function(self.read(()))[index],
            dtype=dtype,
            features=self.features,
            path=self.path,
        )

    def picked(self, name: str, dim: int | None = 0, bits: int = WORD_BITS) -> "CheckpointTensor":
        """Return only the selected output features, as a tensor.

        Args:
            name: name of the tensor, for errors.
            dim: the dimension of the output features; None: the tensor is the same for all of them.
            bits: bits of one feature, if features are packed into words along that dimension; 32:
                not packed.

        Raises:
            WeightLoadError: the tensor has another number of features, or they do not fill words.
        """
        part = self.features
        if part is None:
            return self
        whole = replace(self, features=None)
        if dim is None:
            return whole
        words = part.in_words(bits)
        if words is None:
            raise WeightLoadError(
                f"tensor {name} stores {WORD_BITS // bits} output features in a word: the "
                f"{part.count} features from index {part.start} in each {part.group} do not fill "
                "whole words, so the layer cannot be divided into the parts that the model needs. "
                "Use a checkpoint in a different format"
            )
        if len(self.shape) <= dim or self.shape[dim] != words.total:
            raise WeightLoadError(
                f"tensor {name} has shape {list(self.shape)} in the checkpoint, but the model "
                f"needs {words.total} in dimension {dim}, for the {part.total} output features "
                "of the layer"
            )
        if words.group == words.total:
            return whole.narrow(dim, words.start, words.count)
        return whole.mapped(partial(_pick, dim=dim, words=words))

    def fill(self, target: Tensor, index: Index = ()) -> None:
        """Copy the part `index` into `target`, which has its shape, and convert to its dtype."""
        if self.copy_to is None:
            target.copy_(self.read(index))
        else:
            self.copy_to(target, index)


NamedTensors = Iterable[tuple[str, CheckpointTensor]]
"""Names of tensors, and the tensors."""


def _pick(tensor: Tensor, dim: int, words: Features) -> Tensor:
    groups = tensor.unflatten(dim, (-1, words.group))
    return groups.narrow(dim + 1, words.start, words.count).flatten(dim, dim + 1)


@dataclass(frozen=True)
class Slice:
    """Rows (dim 0) or columns (dim 1) of a parameter that one checkpoint tensor fills."""

    dim: int
    offset: int
    """First index in this rank's parameter."""
    size: int
    """Number of indices in this rank's parameter."""
    total: int
    """Number of indices in the checkpoint tensor; below size * ranks when the last ranks hold
    padding."""
    num_replicas: int = 1
    """Ranks that hold the same shard; above 1 when there are fewer KV heads than ranks."""
    tensor: str | None = None
    """Last part of the name in the checkpoint; None: the name of the parameter."""

    def checkpoint_shape(self, param: Tensor) -> torch.Size:
        """Return the shape that the checkpoint tensor must have."""
        shape = list(param.shape)
        shape[self.dim] = self.total
        return torch.Size(shape)

    def in_groups(self, group: int) -> "Slice":
        """Return the slice for a parameter that has one column per `group` columns, such
        as scales.
        """
        if self.dim == 0:
            return self
        offset, size, total = (n // group for n in (self.offset, self.size, self.total))
        return replace(self, offset=offset, size=size, total=total)

    def copy(self, param: Tensor, source: CheckpointTensor, tp: TPGroup) -> None:
        """Fill this rank's part of `param`, converting to its dtype; padding is set to zero."""
        start = min(tp.rank // self.num_replicas * self.size, self.total)
        num_real = min(self.size, self.total - start)
        shard = param.narrow(self.dim, self.offset, self.size)
        if num_real:
            part = (slice(None),) * self.dim + (slice(start, start + num_real),)
            source.fill(shard.narrow(self.dim, 0, num_real), part)
        if num_real < self.size:
            shard.narrow(self.dim, num_real, self.size - num_real).zero_()


def whole(dim: int, offset: int, size: int, tp: TPGroup) -> Slice:
    """Return a slice that is filled in the same way on every rank."""
    return Slice(dim, offset, size, size, num_replicas=tp.size)


def packed_slices(
    sizes: Mapping[str, int], tp: TPGroup, num_replicas: Mapping[str, int] | None = None
) -> dict[str, Slice]:
    """Return the slices of a parameter whose rows are several checkpoint tensors in order.

    Args:
        sizes: name of a tensor -> its rows over all ranks.
        tp: the ranks that share the rows.
        num_replicas: name -> ranks that have the same rows, when not 1.

    Raises:
        ValueError: a size cannot be split evenly.
    """
    slices: dict[str, Slice] = {}
    offset = 0
    for name, total in sizes.items():
        replicas = (num_replicas or {}).get(name, 1)
        size = divide(total * replicas, tp.size)
        slices[name] = Slice(0, offset, size, total, replicas)
        offset += size
    return slices


@dataclass(frozen=True, kw_only=True)
class ExpertSlice(Slice):
    """Rows or columns of one expert's matrix in a parameter [experts, ...]."""

    expert: int

    def checkpoint_shape(self, param: Tensor) -> torch.Size:
        return super().checkpoint_shape(param[self.expert])

    def copy(self, param: Tensor, source: CheckpointTensor, tp: TPGroup) -> None:
        super().copy(param[self.expert], source, tp)


def dtype_name(dtype: torch.dtype | None) -> str:
    """Return the usual name of a dtype, such as float32."""
    return str(dtype).removeprefix("torch.")


WeightSlices = dict[str, dict[str, Slice]]
"""Parameter name -> name of the checkpoint module, "" for the layer's own -> its slice."""


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
class ParamTarget:
    """The parameter that a checkpoint tensor fills."""

    module: torch.nn.Module
    param_name: str
    slice: Slice | None
    """Part of the parameter; None: all of it."""

    @property
    def param(self) -> Tensor:
        """The whole parameter, not only the part that the tensor fills."""
        return getattr(self.module, self.param_name)

    def fill(self, name: str, source: CheckpointTensor, tp: TPGroup) -> None:
        """Copy this rank's part of a tensor, converting to the dtype of the parameter.

        Raises:
            WeightLoadError: it has another shape, or contains quantized values for dense weights.
        """
        source = source.picked(name)
        param = self.param
        if param.is_floating_point() and source.dtype not in (*DENSE_DTYPES, param.dtype, None):
            raise WeightLoadError(
                f"tensor {name} has the dtype {dtype_name(source.dtype)} in the checkpoint, but "
                f"the layer is not quantized: it needs float32, float16 or bfloat16. Is "
                f"quantization_config in config.json missing, does it leave this layer out, or "
                f"does the checkpoint lack its scales?"
            )
        expected = self.slice.checkpoint_shape(param) if self.slice else param.shape
        if source.shape != expected:
            raise WeightLoadError(
                f"tensor {name} has shape {list(source.shape)} in the checkpoint, but the model "
                f"needs {list(expected)}"
            )
        if self.slice is None:
            source.fill(param)
        else:
            self.slice.copy(param, source, tp)
