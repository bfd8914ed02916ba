"""`torch.ops.hpu.mixture_of_experts`, by its documented schema: an operator of the bridge, whoever
has registered it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_NAME, _OVERLOAD = "mixture_of_experts", "fused_weights"


class FusedExperts:
    """The part of `FusedKernels` about experts."""

    @property
    def has_moe(self) -> bool:
        """Whether this bridge has the operator for gates and ups that are one weight."""
        operator: Any = getattr(torch.ops.hpu, _NAME, None)
        return operator is not None and _OVERLOAD in operator.overloads()

    def moe(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Sequence[Tensor],
        down: Sequence[Tensor],
        first_expert: int = 0,
    ) -> Tensor:
        """See `FusedKernels.moe`."""
        operator: Any = getattr(torch.ops.hpu, _NAME)
        out: Tensor = operator(
            hidden_states=x,
            expert_routing_table=ids,
            router_weights=weights,
            w12=list(gate_up),
            w3=list(down),
            permuted_weights=True,
            activation="silu",
            experts_min=first_expert,
            experts_max=first_expert + len(down) - 1,
        )
        return out
