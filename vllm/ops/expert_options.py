"""Options of experts and of routing: activation, biases, and the choice of experts."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

Routing = Literal["softmax", "softmax_of_chosen", "sigmoid", "sigmoid_of_chosen", "sparse_mixer"]
"""The weight of a chosen expert: its part of a softmax over all experts, or over the chosen ones;
its sigmoid, or that divided by the sum of the chosen ones. `sparse_mixer`: its part of a softmax
over itself and the experts near below it, without those chosen before (`tolerance`)."""


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Options of the experts of a layer: activation, use of routing weights, ids."""

    has_gate: bool = True
    """False: there are no gates, and the middle is max(up, 0)^2 (Nemotron 3)."""
    is_gelu: bool = False
    """The middle is gelu(gate) * up, with the approximation by tanh (Gemma 4)."""
    alpha: float = 1.702
    """Factor alpha of the clamped activation; no effect without `limit`."""
    limit: float | None = None
    """None: the middle is silu(gate) * up, or as said above. Else it is gate * sigmoid(alpha *
    gate) * (up + 1), of gates up to this and ups between its negative and this (GPT-OSS), rounded
    once."""
    scales_inputs: bool = False
    """The weight of a choice multiplies x (Llama 4), and not the result."""
    first_expert: int | None = None
    """Id of the first expert of this rank. Experts of other ids are on other ranks, and are left
    out of the sum. None: this rank has all experts."""

    @property
    def is_silu(self) -> bool:
        """Whether experts compute silu(gate) * up, with routing weights applied to their
        results.
        """
        is_plain = self.limit is None and not self.is_gelu
        return self.has_gate and is_plain and not self.scales_inputs

    @property
    def parts(self) -> tuple[str, ...]:
        """Names in checkpoints of an expert's weights, `down_proj` last."""
        return ("gate_proj", "up_proj", "down_proj") if self.has_gate else ("up_proj", "down_proj")

    def first_width(self, size: int) -> int:
        """Return the output features of the first matmul of an expert, given its
        intermediate size.
        """
        return 2 * size if self.has_gate else size


@dataclass(frozen=True)
class ExpertGroups:
    """Groups of consecutive experts, equal in size; a token chooses only from some groups."""

    num_groups: int
    top_groups: int
    """Number of groups with the best expert that are searched or, if choices have a bias, with the
    best sum of two experts."""


ONE_GROUP = ExpertGroups(1, 1)


@dataclass(frozen=True, kw_only=True)
class RoutingOptions:
    """Rules for choosing the experts of each token and computing their weights."""

    top_k: int
    """Experts of a token, from 1 to all."""
    weights: Routing
    """Computed in float32."""
    scale: float = 1.0
    """Multiplies the weights."""
    tolerance: float = 0.0
    """Tolerance of `sparse_mixer`: an expert with the logit y is near below a chosen one with the
    logit x if x - y is at most this much of the larger one of x and |y|."""
    groups: ExpertGroups = ONE_GROUP
    """Groups of experts from which a token chooses."""


SILU_EXPERTS = ExpertOptions()
"""The options of most families."""

SQUARED_RELU_EXPERTS = ExpertOptions(has_gate=False)
"""The options of Nemotron 3."""


class ExpertBiases(NamedTuple):
    """Biases of the two linear layers of E experts of intermediate size I."""

    gate_up: Tensor | None = None
    """[E, 2 * I], gate then up; None: no bias. Experts without gates have none."""
    down: Tensor | None = None
    """[E, hidden]; None: no bias."""


NO_BIASES = ExpertBiases()
