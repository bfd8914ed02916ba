"""How tokens choose experts, and what an expert computes besides its products."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

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
    first_expert: int | None = None
    """Id of the first of the experts of this rank. Other ids are those of experts of other ranks,
    whose part of the sum is left out. None: there are no others."""

    @property
    def is_silu(self) -> bool:
        """Whether an expert computes what those of most families do."""
        return self.limit is None and not self.scales_inputs


@dataclass(frozen=True)
class ExpertGroups:
    """Equally many experts each, in their order; a token chooses from some of them only."""

    num_groups: int
    top_groups: int
    """Those with the best expert, or, where choices have a bias, with the best two together."""


ONE_GROUP = ExpertGroups(1, 1)


@dataclass(frozen=True, kw_only=True)
class RoutingOptions:
    """How each token chooses its experts, and how much they count."""

    top_k: int
    """Experts of a token, from 1 to all."""
    weights: Routing
    """Computed in float32."""
    scale: float = 1.0
    """Multiplies the weights."""
    groups: ExpertGroups = ONE_GROUP
    """From which of the experts a token chooses."""


SILU_EXPERTS = ExpertOptions()
"""Those of most families."""


class ExpertBiases(NamedTuple):
    """What is added to the products of E experts of intermediate size I."""

    gate_up: Tensor | None = None
    """[E, 2 * I], to the first product, gate then up."""
    down: Tensor | None = None
    """[E, hidden], to the second one."""


NO_BIASES = ExpertBiases()
