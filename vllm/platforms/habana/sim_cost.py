"""What an operator is to a card: its signature in a recipe, its cost, and whether it can run.

The rules are those documented for the bridge; an operator without a rule runs on the device.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm.platforms.habana import sim_spec
from vllm.platforms.habana.sim_args import leaves_of
from vllm.platforms.habana.sim_clock import Work

MAX_STABLE_SORT = 37
"""A stable sort along a longer dimension, or along dimension 0, runs on the host."""

_SORTABLE = (torch.float32, torch.bfloat16, torch.float16, torch.int16)
_NO_INT64 = ("gather", "scatter", "masked_fill", "argmax", "index_put")
_DYNAMIC = ("nonzero", "masked_select", "repeat_interleave", "unique2", "unique_dim")
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# What is documented for fp8, and what only moves it.
_FP8_NAMES = (
    *("mm", "addmm", "index_select", "index_copy", "masked_fill", "embedding"),
    *("to_copy", "copy", "clone", "fill", "zero", "cat", "stack", "where"),
)
_FIRST_FACTOR = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}


def signature_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What tells this operator from another one in a recipe: scalars are compile-time constants."""
    parts = [op.name()]
    for leaf in leaves_of(args, kwargs):
        if isinstance(leaf, torch.Tensor):
            parts.append(f"{leaf.dtype}{tuple(leaf.shape)}")
        elif isinstance(leaf, torch.Generator | torch.ScriptObject):
            parts.append(type(leaf).__name__)
        else:
            parts.append(repr(leaf))
    return " ".join(parts)


def base_name(op: Any) -> str:
    """`index_put` of `aten::index_put_`; overloads count as one."""
    name: str = op.name().partition("::")[2].partition(".")[0]
    return name.strip("_")


def needs_host(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_lazy: bool
) -> str | None:
    """ "shape" when the result's shape depends on data, "kernel" when the device has none."""
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
    # In lazy mode int64 is int32 on the device.
    return is_lazy or operand.dtype != torch.int64 or not name.startswith(_NO_INT64)


def work_of(op: Any, operands: list[torch.Tensor], results: list[torch.Tensor]) -> Work:
    """The cost of an operator, none for a view."""
    if op.is_view:
        return Work()
    num_bytes = sum(x.nbytes for x in operands) + sum(x.nbytes for x in results)
    name = base_name(op)
    if "sdpa" in name:
        query, key = operands[0], operands[1]
        flops = 4.0 * query.numel() * key.shape[-2]
        is_fp8 = query.dtype.itemsize == 1
        return Work(flops, num_bytes, sim_spec.SDPA_SHARE, is_fp8=is_fp8)
    if name == "mixture_of_experts":
        num_choices, gate_up = operands[1].numel(), operands[3]
        in_a_byte = 2 if gate_up.dtype == torch.uint8 else 1
        return Work(3.0 * num_choices * gate_up.numel() * in_a_byte, num_bytes)
    if name in _FIRST_FACTOR:
        left = operands[min(_FIRST_FACTOR[name], len(operands) - 1)]
        flops = 2.0 * results[0].numel() * left.shape[-1]
        return Work(flops, num_bytes, is_fp8=left.dtype.itemsize == 1)
    if name.startswith("fp8_gemm"):
        flops = 2.0 * operands[0].numel() * results[0].shape[-1]
        return Work(flops, num_bytes, is_fp8=True)
    if name in ("index_select", "embedding", "gather"):
        num_bytes = 2 * results[0].nbytes  # only the chosen rows move
    elif name in ("index_copy", "index_put"):
        num_bytes = 2 * operands[-1].nbytes
        if not op._schema.is_mutable:  # the rest is copied
            num_bytes += 2 * operands[0].nbytes
    return Work(num_bytes=num_bytes)
