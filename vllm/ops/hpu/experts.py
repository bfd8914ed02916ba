"""Dense experts on a Gaudi card: one operator for all experts, if there is a suitable one."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from vllm.ops.expert_options import SILU_EXPERTS, ExpertBiases, ExpertOptions
from vllm.ops.native.operators import NativeOps
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.platforms.habana.kernels import FusedKernels

NATIVE = NativeOps()
"""Made here: of an object that is made while they trace, torch 2.10 and 2.11 cannot trace a default
of ours, as `options` of `moe` is."""

_PARTS = (
    "mixture_of_experts",
    "mixture_of_experts with biases",
    "mixture_of_experts in fp8",
    "mixture_of_experts in MXFP4",
    "mixture_of_experts in MXFP4 with biases",
)
"""Names of the parts of `ExpertOperators`, in order."""


class ExpertOperators(NamedTuple):
    """Fused operators for experts that a card has.

    It is asked before a model runs, because compiled code cannot ask.
    """

    plain: bool
    biased: bool
    fp8: bool
    mxfp4: bool
    biased_mxfp4: bool

    @classmethod
    def of(cls, kernels: FusedKernels, options: ExpertOptions = SILU_EXPERTS) -> "ExpertOperators":
        """Return the operators of a card that experts with these options may need.

        Operators with biases are looked up only for experts with biases, because the first look-up
        runs one of them on the card.
        """
        has_biases = options.limit is not None
        return cls(*(("biases" not in x or has_biases) and kernels.has(x) for x in _PARTS))


@dataclass(frozen=True)
class CardExperts:
    """Computes experts on a card.

    The operator `mixture_of_experts` supports two activations: silu without biases, and the clamped
    activation of GPT-OSS with biases. Torch computes all other cases, and plain eager mode.
    """

    kernels: FusedKernels
    bridge: HabanaBridge
    operators: ExpertOperators
    options: ExpertOptions

    @property
    def can_fuse(self) -> bool:
        """Whether fused operators for experts can be called: in lazy mode, or while compiling."""
        return self.bridge.is_recording

    def is_plain(self, biases: ExpertBiases) -> bool:
        """Return whether every fused operator supports these experts: silu without biases."""
        return self.options.is_silu and biases.gate_up is biases.down is None

    def moe(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        biases: ExpertBiases,
        has_inputs_first: bool = False,
    ) -> Tensor:
        """Compute the experts of each token; see `NativeOps.moe`.

        Args:
            x: inputs; see `NativeOps.moe`.
            ids: ids; see `NativeOps.moe`.
            weights: weights; see `NativeOps.moe`.
            gate_up: [E, 2 * I, hidden], or [E, I, hidden] without gates.
            down: [E, hidden, I].
            biases: biases; see `NativeOps.moe`.
            has_inputs_first: the last two dimensions of both weights are exchanged.
        """
        is_plain = self.is_plain(biases)
        if self.can_fuse and not self.options.scales_inputs:
            routed, first = (x, ids, weights.to(x.dtype)), self.options.first_expert or 0
            if is_plain and self.operators.plain:
                return self.kernels.moe(
                    *routed, gate_up.unbind(0), down.unbind(0), first, has_inputs_first
                )
            if self.options.limit is not None and self.operators.biased:
                dim = 2 if has_inputs_first else 1
                added = [  # the operator requires biases
                    weight.new_zeros(len(weight), weight.shape[dim]) if bias is None else bias
                    for bias, weight in zip(biases, (gate_up, down), strict=True)
                ]
                alpha, limit = self.options.alpha, self.options.limit
                # `in_turn` copies the weights in each forward pass: the operator needs gates and
                # ups interleaved, and the layer stores all gates before all ups.
                return self.kernels.bias_moe(
                    *routed,
                    in_turn(gate_up, dim).unbind(0),
                    down.unbind(0),
                    in_turn(added[0], 1).unbind(0),
                    added[1].unbind(0),
                    alpha,
                    limit,
                    first,
                    has_inputs_first,
                )
        if has_inputs_first:
            gate_up, down = gate_up.mT, down.mT
        return NATIVE.moe(*(x, ids, weights, gate_up, down, biases, self.options))


def in_turn(x: Tensor, dim: int) -> Tensor:
    """Interleave gates and ups along a dimension that has all gates before all ups.

    Operators with biases need this order.
    """
    return x.unflatten(dim, (2, -1)).transpose(dim, dim + 1).flatten(dim, dim + 1)


class CardLayer(nn.Module):
    """Experts of a layer in the layout of a card.

    Their biases remain parameters of the layer, so they are in memory only once.

    Args:
        card: computes the experts.
        biases: biases of the experts.
    """

    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(self, card: CardExperts, biases: ExpertBiases) -> None:
        super().__init__()
        self._card = card
        self.register_parameter("gate_up_bias", _kept(biases.gate_up))
        self.register_parameter("down_bias", _kept(biases.down))

    @property
    def _biases(self) -> ExpertBiases:
        return ExpertBiases(self.gate_up_bias, self.down_bias)


def _kept(bias: Tensor | None) -> nn.Parameter | None:
    if bias is None or isinstance(bias, nn.Parameter):
        return bias
    return nn.Parameter(bias, requires_grad=False)
