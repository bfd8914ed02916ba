"""Operators that a card computes differently from the CPU, by name.

Operators with the same result on the CPU are not in the table. All work on the underlying CPU
tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gaudi_sim.card.device import active_card
from gaudi_sim.kernels.fp8 import is_fp8, saturate


def _index_select(self: Tensor, dim: int, index: Tensor) -> Tensor:
    """Select rows like a card, which does not check indices: rows outside become zeros here."""
    try:
        return self.index_select(dim, index)
    except (IndexError, RuntimeError):  # the type of the error depends on the dimension
        is_inside = _is_inside(index, self.size(dim))
        if is_inside.all():
            raise
    rows = self.index_select(dim, index.where(is_inside, 0))
    shape = [1] * rows.dim()
    shape[dim] = -1
    return rows.where(is_inside.view(shape), torch.zeros((), dtype=rows.dtype))


def _index_copy_(self: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Copy rows like a card: indices outside are skipped, and FP8 is copied as bytes.

    The CPU has no kernel for FP8.
    """
    target, rows = (x.view(torch.uint8) if is_fp8(x.dtype) else x for x in (self, source))
    try:
        target.index_copy_(dim, index, rows)
    except (IndexError, RuntimeError):
        is_inside = _is_inside(index, self.size(dim))
        if is_inside.all():
            raise
        kept = is_inside.nonzero().flatten()
        target.index_copy_(dim, index[kept], rows.index_select(dim, kept))
    return self


def _refuse_negative(indices: Sequence[Tensor | None]) -> None:
    """Check for negative indices, which a card does not count from the end.

    Its result for such indices is not documented.

    Raises:
        IndexError: there are some, and the card is strict.
    """
    if not active_card().is_strict:
        return
    for index in indices:
        if index is not None and index.dtype in (torch.int32, torch.int64) and (index < 0).any():
            raise IndexError(
                "an index tensor must not have negative indices: a card does not count them from "
                "the end"
            )


def _index(self: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    _refuse_negative(indices)
    rows: Tensor = torch.ops.aten.index(self, indices)
    return rows


def _index_put_(
    self: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    _refuse_negative(indices)
    result: Tensor = torch.ops.aten.index_put_(self, indices, values, accumulate)
    return result


def _is_inside(index: Tensor, size: int) -> Tensor:
    """Return which indices are inside of a dimension, bool.

    Raises:
        IndexError: some are outside, and the card is strict. That a card skips them is known from
            software that relies on it, not from the vendor's documentation.
    """
    is_inside = (index >= 0) & (index < size)
    outside = index[~is_inside].tolist()
    if outside and active_card().is_strict:
        raise IndexError(f"indices must be from 0 to {size - 1} in this dimension, got {outside}")
    return is_inside


def _to_copy(self: Tensor, **kwargs: Any) -> Tensor:
    """Copy with a cast; casts to FP8 saturate at the card's largest value."""
    dtype = kwargs.get("dtype")
    if dtype is not None and is_fp8(dtype) and not is_fp8(self.dtype):
        self = saturate(self, dtype)
    copy: Tensor = torch.ops.aten._to_copy(self, **kwargs)
    return copy


def _copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if is_fp8(self.dtype) and not is_fp8(source.dtype):
        source = saturate(source, self.dtype)
    return self.copy_(source, non_blocking)


def _masked_fill_(self: Tensor, mask: Tensor, value: float) -> Tensor:
    """Fill masked elements. FP8, for which the CPU has no kernel, is filled as bytes."""
    if not is_fp8(self.dtype):
        return self.masked_fill_(mask, value)
    number = saturate(torch.tensor(float(value)), self.dtype).to(self.dtype)
    self.view(torch.uint8).masked_fill_(mask, number.view(torch.uint8))
    return self


def _masked_fill(self: Tensor, mask: Tensor, value: float) -> Tensor:
    if not is_fp8(self.dtype):
        return self.masked_fill(mask, value)
    return _masked_fill_(self.clone(), mask, value)


SEMANTICS: dict[str, Callable[..., Any]] = {
    "aten::_to_copy": _to_copy,
    "aten::copy_": _copy_,
    "aten::index.Tensor": _index,
    "aten::index_copy_": _index_copy_,
    "aten::index_put_": _index_put_,
    "aten::index_select": _index_select,
    "aten::masked_fill.Scalar": _masked_fill,
    "aten::masked_fill_.Scalar": _masked_fill_,
}


_EXCHANGES = ("c10d::send", "c10d::recv_")


def collective(op: Any) -> Callable[..., Any]:
    """Return a collective that has finished when it returns, so that a replay need not wait.

    An exchange between two cards is different: the caller waits for it, and gloo interprets a
    second wait as one for another message.
    """
    is_exchange = op._schema.name in _EXCHANGES

    def run(*args: Any, **kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        if is_exchange:
            return result
        for part in result if isinstance(result, Sequence) else (result,):
            if isinstance(part, torch.ScriptObject):
                work: Any = part
                work.wait()
        return result

    return run
