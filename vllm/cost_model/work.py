"""FLOPs and bytes of an operator on a card, by its name and its operands.

Operands are torch tensors, or anything with the same shapes and sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.cost_model import constants
from vllm.cost_model.cards import CardSpec

_FIRST_FACTOR = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}


@dataclass(frozen=True)
class Work:
    """The FLOPs and bytes of one operator."""

    flops: float = 0
    num_bytes: int = 0
    flops_share: float = constants.GEMM_SHARE
    is_fp8: bool = False

    def seconds(self, spec: CardSpec) -> float:
        """Return the time for computing or for moving the bytes, whichever is longer."""
        peak = spec.fp8_flops if self.is_fp8 else spec.bf16_flops
        moving = self.num_bytes / (constants.HBM_SHARE * spec.hbm_bytes_per_s)
        return max(self.flops / (self.flops_share * peak), moving)


def base_name(op: Any) -> str:
    """Return the name without namespace, overload and underscores: `index_put` for
    `aten::index_put_`.
    """
    name: str = op.name().partition("::")[2].partition(".")[0]
    return name.strip("_")


def work_of(op: Any, operands: Sequence[Any], results: Sequence[Any]) -> Work:
    """Return the work of a torch operator; no work for a view.

    Args:
        op: the overload of the operator (`torch._ops.OpOverload`).
        operands: tensors of the operator, in the order of its arguments.
        results: the tensors that it returns.
    """
    if op.is_view:
        return Work()
    num_bytes = sum(x.nbytes for x in operands) + sum(x.nbytes for x in results)
    name = base_name(op)
    if "sdpa" in name:
        query, key = operands[0], operands[1]
        flops = 4.0 * query.numel() * key.shape[-2]
        is_fp8 = query.dtype.itemsize == 1
        return Work(flops, num_bytes, constants.SDPA_SHARE, is_fp8=is_fp8)
    if name == "mixture_of_experts":
        num_choices, gate_up = operands[1].numel(), operands[3]
        in_a_byte = 2 if str(gate_up.dtype) == "torch.uint8" else 1
        return Work(3.0 * num_choices * gate_up.numel() * in_a_byte, num_bytes)
    if name in _FIRST_FACTOR:
        left = operands[min(_FIRST_FACTOR[name], len(operands) - 1)]
        flops = 2.0 * results[0].numel() * left.shape[-1]
        return Work(flops, num_bytes, is_fp8=left.dtype.itemsize == 1)
    if name.startswith("fp8_gemm"):
        flops = 2.0 * operands[0].numel() * results[0].shape[-1]
        return Work(flops, num_bytes, is_fp8=True)
    if name in ("index_select", "embedding", "gather"):
        num_bytes = 2 * results[0].nbytes  # only the selected entries are moved
    elif name in ("index_copy", "index_put"):
        num_bytes = 2 * operands[-1].nbytes
        # An operator that is not in place also copies the other entries.
        if not op._schema.is_mutable:
            num_bytes += 2 * operands[0].nbytes
    return Work(num_bytes=num_bytes)
