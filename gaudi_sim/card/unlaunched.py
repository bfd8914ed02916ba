"""Results of operators in compile-only mode, where a card launches nothing: tensors of zeros.

A real card leaves garbage there. Zeros are the safest garbage, since they are valid indices, counts
and tokens, and large ones need no host memory. Knows no card and no recipe.
"""

import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gaudi_sim.card.args import leaves_of, map_leaves

_MAP_NORESERVE = 0x4000  # the value on Linux; Python has the name since 3.13
_MAPPED_BYTES = 2**18
"""Zeros of that size are mapped faster than they are written."""
_META = torch.device("meta")


def mapped_zeros(num_bytes: int) -> Tensor:
    """Return zeros, uint8 [num_bytes], whose memory pages are allocated when they are written.

    So the host need not have as much memory as a card.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    pages = mmap.mmap(-1, max(1, num_bytes), flags=flags)
    return torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes]


class Layout:
    """Shape, strides and dtype of a new tensor, without its values."""

    __slots__ = ("_dtype", "_is_filled", "_num_bytes", "_offset", "_shape", "_strides")

    def __init__(self, x: Tensor) -> None:
        self._shape = x.shape
        self._strides = x.stride()
        self._offset = x.storage_offset()
        self._dtype = x.dtype
        self._num_bytes = x.untyped_storage().nbytes()
        # Small tensors that fill their storage are made in half of the time.
        self._is_filled = (
            x.is_contiguous() and x.nbytes == self._num_bytes and self._num_bytes < _MAPPED_BYTES
        )

    def zeros(self) -> Tensor:
        """Return a tensor of zeros with its own storage, as large as the operator's."""
        if self._is_filled:
            return torch.empty_strided(self._shape, self._strides, dtype=self._dtype).zero_()
        if self._num_bytes < _MAPPED_BYTES:
            flat = torch.zeros(self._num_bytes, dtype=torch.uint8)
        else:
            flat = mapped_zeros(self._num_bytes)
        return flat.view(self._dtype).as_strided(self._shape, self._strides, self._offset)


class Results:
    """The results of an operator for operands of certain shapes, strides, dtypes and numbers."""

    __slots__ = ("_structure",)

    def __init__(self, structure: Any) -> None:
        """Store the structure of the results.

        Args:
            structure: the result of the operator, with a `Layout` for a new tensor; and for an
                operand that was written to, its index in the order of `leaves_of`.
        """
        self._structure = structure

    def make(self, *args: Any, **kwargs: Any) -> Any:
        """Return zeros instead of computed results; written operands are returned unchanged."""
        structure = self._structure
        if type(structure) is Layout:
            return structure.zeros()

        def make(x: Any) -> Any:
            if x is None:
                return None
            return x.zeros() if type(x) is Layout else leaves_of(args, kwargs)[x]

        return map_leaves(make, structure)


def results_of(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Results | None:
    """Find out what an operator returns, by running it on operands without values.

    Returns:
        None: it has no kernel for these, it returns numbers or a part of an operand, or it changes
        the shape of one. Then it has to be computed.
    """
    operands = leaves_of(args, kwargs)
    on_meta = {id(x): _without_values(x) for x in operands if isinstance(x, Tensor)}

    def to_meta(x: Any) -> Any:
        if isinstance(x, torch.device):
            return _META
        if isinstance(x, torch.Generator):
            return None  # the meta device has no random generators
        return on_meta.get(id(x), x)

    try:
        returned = op(*map_leaves(to_meta, list(args)), **map_leaves(to_meta, kwargs))
    except (RuntimeError, LookupError, TypeError, ValueError, AssertionError):
        return None  # wrong operands: running the operator raises the proper error
    if any(_layout(x) != _layout(on_meta[id(x)]) for x in operands if isinstance(x, Tensor)):
        return None
    numbers = {id(on_meta[id(x)]): i for i, x in enumerate(operands) if isinstance(x, Tensor)}
    storages = {x.untyped_storage()._cdata for x in on_meta.values()}
    for x in leaves_of(returned):
        if x is None or id(x) in numbers:
            continue
        if not isinstance(x, Tensor) or x.untyped_storage()._cdata in storages:
            return None
        storages.add(x.untyped_storage()._cdata)

    def describe(x: Any) -> Any:
        return x if x is None else numbers[id(x)] if id(x) in numbers else Layout(x)

    return Results(map_leaves(describe, returned))


def _without_values(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=_META)


def _layout(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride()
