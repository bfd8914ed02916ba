"""Call `torch.ops.hpu.mixture_of_experts` by its documented schema, on a real or simulated
bridge.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_NAME = "mixture_of_experts"
_MXFP4, _BIAS_MXFP4 = "mxfp4_fused_weights", "bias_mxfp4_fused_weights"
_MXFP4_BLOCK = 32
"""Elements with one scale."""


class FusedExperts:
    """The kernels of `FusedKernels` for experts."""

    def moe(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Sequence[Tensor],
        down: Sequence[Tensor],
        first_expert: int = 0,
        has_inputs_first: bool = False,
    ) -> Tensor:
        """Run the operator for `FusedKernels.moe`."""
        options = _options(first_expert, len(down), has_inputs_first)
        return _call(x, ids, weights, gate_up, down, activation="silu", **options)

    def bias_moe(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Sequence[Tensor],
        down: Sequence[Tensor],
        gate_up_bias: Sequence[Tensor],
        down_bias: Sequence[Tensor],
        alpha: float,
        limit: float,
        first_expert: int = 0,
        has_inputs_first: bool = False,
    ) -> Tensor:
        """Run the operator for `FusedKernels.bias_moe`."""
        return _call(
            *(x, ids, weights, gate_up, down),
            w12_bias=list(gate_up_bias),
            w3_bias=list(down_bias),
            alpha=alpha,
            limit=limit,
            **_options(first_expert, len(down), has_inputs_first),
        )

    def fp8_moe(
        self,
        numbers: Tensor,
        scale: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Sequence[Tensor],
        gate_up_scales: Sequence[Tensor],
        down: Sequence[Tensor],
        down_scales: Sequence[Tensor],
        first_expert: int = 0,
    ) -> Tensor:
        """Run the operator for `FusedKernels.fp8_moe`."""
        return _call(
            *(numbers, ids, weights, gate_up, down),
            d_scale_hidden_states=scale,
            d_scale_w12=list(gate_up_scales),
            d_scale_w3=list(down_scales),
            activation="silu",
            **_options(first_expert, len(down)),
        )

    def mxfp4_moe(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Sequence[Tensor],
        gate_up_scales: Sequence[Tensor],
        down: Sequence[Tensor],
        down_scales: Sequence[Tensor],
        first_expert: int = 0,
    ) -> Tensor:
        """Run the operator for `FusedKernels.mxfp4_moe`."""
        lists = (gate_up, down, gate_up_scales, down_scales)
        return _call_mxfp4(
            _MXFP4, (x, ids, weights), lists, activation="silu", **_options(first_expert, len(down))
        )

    def bias_mxfp4_moe(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Sequence[Tensor],
        gate_up_scales: Sequence[Tensor],
        down: Sequence[Tensor],
        down_scales: Sequence[Tensor],
        gate_up_bias: Sequence[Tensor],
        down_bias: Sequence[Tensor],
        alpha: float,
        limit: float,
        first_expert: int = 0,
    ) -> Tensor:
        """Run the operator for `FusedKernels.bias_mxfp4_moe`."""
        lists = (gate_up, down, gate_up_bias, down_bias, gate_up_scales, down_scales)
        return _call_mxfp4(
            *(_BIAS_MXFP4, (x, ids, weights), lists),
            alpha=alpha,
            limit=limit,
            **_options(first_expert, len(down)),
        )


def _call_mxfp4(
    overload: str,
    routed: tuple[Tensor, Tensor, Tensor],
    lists: Sequence[Sequence[Tensor]],
    **options: Any,
) -> Tensor:
    """Run an MXFP4 overload. Its tensors are passed by position, as in the vendor's tests."""
    operator: Any = getattr(getattr(torch.ops.hpu, _NAME), overload)
    out: Tensor = operator(
        *routed,
        *(list(tensors) for tensors in lists),
        block_size=_MXFP4_BLOCK,
        is_fp4=True,
        **options,
    )
    return out


def _call(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    **more: Any,
) -> Tensor:
    """Run the overload that has these arguments."""
    operator: Any = getattr(torch.ops.hpu, _NAME)
    out: Tensor = operator(
        hidden_states=x,
        expert_routing_table=ids,
        router_weights=weights,
        w12=list(gate_up),
        w3=list(down),
        **more,
    )
    return out


def _options(first_expert: int, num_experts: int, has_inputs_first: bool = False) -> dict[str, Any]:
    return {
        "permuted_weights": not has_inputs_first,
        "experts_min": first_expert,
        "experts_max": first_expert + num_experts - 1,
    }
