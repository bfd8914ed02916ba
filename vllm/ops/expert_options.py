"""How tokens choose experts, and what an expert computes besides its products."""

from dataclasses import dataclass
from typing import Literal

Routing = Literal["softmax", "softmax_of_chosen", "sigmoid", "sigmoid_of_chosen"]
"""The weight of a chosen expert: its part of a softmax over all experts, or over the chosen ones;
its sigmoid, or that divided by the sum of the chosen ones."""


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """What an expert computes besides its products, and where its weight counts."""

    alpha: float = 1.702
    """Of the clamped activation; no effect without `limit`."""
    limit: float | None = None
    """None: the middle is silu(gate) * up. Else it is gate * sigmoid(alpha * gate) * (up + 1), of
    gates up to this and ups between its negative and this (GPT-OSS), rounded once."""
    scales_inputs: bool = False
    """The weight of a choice multiplies x (Llama 4), and not the result."""


@dataclass(frozen=True)
class ExpertGroups:
    """Equally many experts each, in their order; a token chooses from some of them only."""

    num_groups: int
    top_groups: int
    """Those with the best expert, or, where choices have a bias, with the best two together."""


ONE_GROUP = ExpertGroups(1, 1)


SILU_EXPERTS = ExpertOptions()
"""Those of most families."""
