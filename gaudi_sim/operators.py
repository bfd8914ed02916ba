"""Properties of operators on a card: their signature in a recipe, and whether they can run.

The rules are those documented for the bridge; an operator without a rule runs on the device.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gaudi_sim.card.args import leaves_of
from vllm.cost_model.work import base_name

MAX_STABLE_SORT = 37
"""A stable sort along a longer dimension, or along dimension 0, runs on the host."""

_SORTABLE = (torch.float32, torch.bfloat16, torch.float16, torch.int16)
_NO_INT64 = ("gather", "scatter", "masked_fill", "argmax", "index_put")
_DYNAMIC = ("nonzero", "masked_select", "repeat_interleave", "unique2", "unique_dim")
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Operators that are documented for FP8, and operators that only move data.
_FP8_NAMES = (
    *("mm", "addmm", "index_select", "index_copy", "masked_fill", "embedding"),
    *("to_copy", "copy", "clone", "fill", "zero", "cat", "stack", "where"),
)


def signature_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the signature of an operator call in a recipe; scalars are compile-time constants."""
    parts = [op.name()]
    for leaf in leaves_of(args, kwargs):
        if isinstance(leaf, torch.Tensor):
            parts.append(f"{leaf.dtype}{tuple(leaf.shape)}")
        elif isinstance(leaf, torch.Generator | torch.ScriptObject):
            parts.append(type(leaf).__name__)
        else:
            parts.append(repr(leaf))
    return " ".join(parts)


def needs_host(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_lazy: bool
) -> str | None:
    """Return why an operator needs the host: "shape", "kernel", or None if it does not.

    "shape": the shape of the result depends on data; "kernel": the device has no kernel.
    """
    name = base_name(op)
    operand = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if operand is None:
        return None
    if name in ("index", "index_put"):
        masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
        if masks:
            return "shape"
    elif name in _DYNAMIC:
        return "shape"
    if operand.dtype in _FP8 and op.namespace == "aten" and name not in _FP8_NAMES:
        return None if op.is_view else "kernel"
    if operand.dtype == torch.float64 or operand.dtype.is_complex:
        return None if op.is_view else "kernel"
    return None if _has_kernel(name, operand, args, kwargs, is_lazy=is_lazy) else "kernel"


def _has_kernel(
    name: str,
    operand: torch.Tensor,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    is_lazy: bool,
) -> bool:
    if name == "sort":
        stable = kwargs.get("stable", False)
        dim = kwargs.get("dim", args[1] if len(args) > 1 and not isinstance(args[1], bool) else -1)
        dim %= max(1, operand.dim())
        if stable and operand.dim() and (dim == 0 or operand.shape[dim] > MAX_STABLE_SORT):
            return False
    is_without_fp16 = name == "exponential" or name.startswith("index_put")
    if is_without_fp16 and operand.dtype == torch.float16:
        return False
    if name in ("sort", "topk"):
        return operand.dtype in _SORTABLE
    if name == "index_reduce":
        return bool(args[1] == 0 and args[4] == "amax" and kwargs.get("include_self", True))
    if name == "index_select":
        return operand.dim() <= 5
    # In lazy mode, int64 is stored as int32 on the device.
    return is_lazy or operand.dtype != torch.int64 or not name.startswith(_NO_INT64)
