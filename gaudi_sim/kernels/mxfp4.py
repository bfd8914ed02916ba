"""Experts in MXFP4 on the simulated card: operators of `torch.ops.hpu`, with the vendor's schemas.

A byte contains two E2M1 elements, the first in the lower four bits; each 32 of a row share a power
of two.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gaudi_sim.kernels.experts import biased_experts, silu_experts, weights_of_experts

_ROUTED = "Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights"
_BLOCK = 32
_E8M0_BIAS = 127
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

SCHEMAS = {
    "mixture_of_experts.mxfp4_fused_weights": (
        f"({_ROUTED}, Tensor[] w12, Tensor[] w3, Tensor[] d_scale_w12, Tensor[] d_scale_w3, *,"
        " int block_size=32, bool permuted_weights=True, str activation, int experts_min,"
        " int experts_max, bool is_fp4=True, int chunk_size=0, int total_experts=0) -> Tensor"
    ),
    "mixture_of_experts.bias_mxfp4_fused_weights": (
        f"({_ROUTED}, Tensor[] w12, Tensor[] w3, Tensor[] w12_bias, Tensor[] w3_bias,"
        " Tensor[] d_scale_w12, Tensor[] d_scale_w3, *, int block_size=32,"
        " bool permuted_weights=True, int experts_min, int experts_max, bool is_fp4=True,"
        " int chunk_size=0, int total_experts=0, float alpha=1.702, float limit=7.0) -> Tensor"
    ),
}


def _check(x: Tensor, *, block_size: int, permuted_weights: bool, is_fp4: bool) -> None:
    if block_size != _BLOCK or not permuted_weights or not is_fp4:
        raise RuntimeError(
            f"MXFP4 experts need block_size={_BLOCK}, permuted_weights=True and is_fp4=True, got "
            f"{block_size}, {permuted_weights} and {is_fp4}"
        )
    if x.dtype != torch.bfloat16:
        raise RuntimeError(f"MXFP4 experts need inputs in bfloat16, got {x.dtype}")


def _dense(packed: Sequence[Tensor], scales: Sequence[Tensor]) -> list[Tensor]:
    """Dequantize the weights to fp32, [rows, columns]."""
    dense = []
    for codes, exponents in zip(packed, scales, strict=True):
        table = torch.tensor([*_E2M1, *(-x for x in _E2M1)], device=codes.device)
        elements = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
        values = table[elements.int()].view(*codes.shape[:-1], -1, _BLOCK)
        powers = torch.exp2(exponents.float() - _E8M0_BIAS)
        dense.append((values * powers.unsqueeze(-1)).flatten(-2))
    return dense


def _experts(
    hidden_states: Tensor,
    expert_routing_table: Tensor,
    router_weights: Tensor,
    w12: list[Tensor],
    w3: list[Tensor],
    d_scale_w12: list[Tensor],
    d_scale_w3: list[Tensor],
    *,
    block_size: int = _BLOCK,
    permuted_weights: bool = True,
    activation: str,
    experts_min: int,
    experts_max: int,
    is_fp4: bool = True,
    chunk_size: int = 0,
    total_experts: int = 0,
) -> Tensor:
    _check(hidden_states, block_size=block_size, permuted_weights=permuted_weights, is_fp4=is_fp4)
    if activation != "silu":
        raise NotImplementedError(
            f"MXFP4 experts: the simulated kernel supports only silu, got {activation}"
        )
    weights = weights_of_experts(
        *(expert_routing_table, router_weights, experts_min, experts_max, len(w12), len(w3))
    )
    dense = _dense(w12, d_scale_w12), _dense(w3, d_scale_w3)
    return silu_experts(hidden_states, weights, *dense, is_permuted=True)


def _bias_experts(
    hidden_states: Tensor,
    expert_routing_table: Tensor,
    router_weights: Tensor,
    w12: list[Tensor],
    w3: list[Tensor],
    w12_bias: list[Tensor],
    w3_bias: list[Tensor],
    d_scale_w12: list[Tensor],
    d_scale_w3: list[Tensor],
    *,
    block_size: int = _BLOCK,
    permuted_weights: bool = True,
    experts_min: int,
    experts_max: int,
    is_fp4: bool = True,
    chunk_size: int = 0,
    total_experts: int = 0,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    _check(hidden_states, block_size=block_size, permuted_weights=permuted_weights, is_fp4=is_fp4)
    counts = (len(w12), len(w3), len(w12_bias), len(w3_bias))
    weights = weights_of_experts(
        *(expert_routing_table, router_weights, experts_min, experts_max), *counts
    )
    dense = _dense(w12, d_scale_w12), _dense(w3, d_scale_w3)
    return biased_experts(
        *(hidden_states, weights, *dense, w12_bias, w3_bias, alpha, limit), is_permuted=True
    )


KERNELS: dict[str, Callable[..., object]] = {
    "mixture_of_experts.mxfp4_fused_weights": _experts,
    "mixture_of_experts.bias_mxfp4_fused_weights": _bias_experts,
}
