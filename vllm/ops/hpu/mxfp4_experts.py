"""Experts in MXFP4 on a Gaudi card whose operator for experts supports the format directly.

Without that operator they are `HPULowBitExperts`, which are dequantized to bfloat16 in each forward
pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vllm.ops.expert_options import ExpertBiases
from vllm.ops.hpu.experts import NATIVE, CardExperts, CardLayer, in_turn
from vllm.ops.stored_weight import E2M1, E8M0_BIAS, Mxfp4Weight, StoredWeight, all_of

_BLOCK_BYTES = 16


class HPUMxfp4Experts(CardLayer):
    """Gated experts in MXFP4.

    For the clamped activation, for which the operator needs biases, gates and ups are interleaved;
    for silu all gates come before all ups. Biases are not converted.

    Args:
        gate_up: gate and up projections of each expert, gate then up.
        down: down projections of each expert.
        biases: biases; see `CardLayer`.
        card: computes the experts; see `CardLayer`.
    """

    elements: Tensor

    def __init__(
        self,
        gate_up: Sequence[Mxfp4Weight],
        down: Sequence[Mxfp4Weight],
        biases: ExpertBiases,
        card: CardExperts,
    ) -> None:
        is_biased = card.options.limit is not None
        first, last = (_stacked(weights) for weights in (gate_up, down))
        if is_biased:  # the operator requires biases
            biases = ExpertBiases(
                *(
                    _zeros(stack[0]) if bias is None else bias
                    for bias, stack in zip(biases, (first, last), strict=True)
                )
            )
            first = in_turn(first[0], 1), in_turn(first[1], 1)
        super().__init__(card, biases)
        self._is_biased = is_biased
        self.gate_up, self.gate_up_scales = (_parameter(x) for x in first)
        self.down, self.down_scales = (_parameter(x) for x in last)
        values = torch.tensor([*E2M1, *(-x for x in E2M1)])
        self.register_buffer("elements", values, persistent=False)

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Compute the experts of each token; see `PreparedExperts`."""
        card = self._card
        if not card.can_fuse:
            return self._one_by_one(x, topk_ids, topk_weights)
        routed = x.to(torch.bfloat16), topk_ids, topk_weights.to(torch.bfloat16)
        tensors = (self.gate_up, self.gate_up_scales, self.down, self.down_scales)
        lists = [each.unbind(0) for each in tensors]
        first = card.options.first_expert or 0
        if not self._is_biased:
            return card.kernels.mxfp4_moe(
                *routed, lists[0], lists[1], lists[2], lists[3], first
            ).to(x.dtype)
        assert self.gate_up_bias is not None and self.down_bias is not None
        assert card.options.limit is not None
        return card.kernels.bias_mxfp4_moe(
            *routed,
            lists[0],
            lists[1],
            lists[2],
            lists[3],
            in_turn(self.gate_up_bias, 1).unbind(0),
            self.down_bias.unbind(0),
            card.options.alpha,
            card.options.limit,
            first,
        ).to(x.dtype)

    def _one_by_one(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        gate_up = self._dense(self.gate_up, self.gate_up_scales, x.dtype)
        down = self._dense(self.down, self.down_scales, x.dtype)
        if self._is_biased:
            gate_up = _apart(gate_up, 1)
        return NATIVE.moe(
            *(x, topk_ids, topk_weights, gate_up, down, self._biases, self._card.options)
        )

    def multiply_gate_up(self, expert: int, x: Tensor) -> Tensor:
        """Multiply x with gate and up of one expert; see `ExpertMatmuls`."""
        weight = self._dense(self.gate_up[expert], self.gate_up_scales[expert], x.dtype)
        return x @ (_apart(weight, 0) if self._is_biased else weight).T

    def multiply_down(self, expert: int, x: Tensor) -> Tensor:
        """Multiply x with down of one expert; see `ExpertMatmuls`."""
        return x @ self._dense(self.down[expert], self.down_scales[expert], x.dtype).T

    def _dense(self, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Dequantize [..., out, in / 2] and [..., out, in / 32] -> [..., out, in]."""
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten().int()
        values = self.elements.index_select(0, codes).view(*scales.shape, -1)
        powers = torch.exp2(scales.float() - E8M0_BIAS)
        return (values * powers.unsqueeze(-1)).flatten(-2).to(dtype)


def prepare_mxfp4_experts(
    gate: Sequence[StoredWeight],
    up: Sequence[StoredWeight],
    down: Sequence[StoredWeight],
    dtype: torch.dtype,
    biases: ExpertBiases,
    card: CardExperts,
) -> HPUMxfp4Experts | None:
    """Prepare MXFP4 experts for the operator; None if it does not support them.

    Args:
        gate: gate projections; see `NativeOps.prepare_experts`.
        up: up projections; see `NativeOps.prepare_experts`.
        down: down projections; see `NativeOps.prepare_experts`.
        dtype: data type of the inputs.
        biases: biases; see `CardLayer`.
        card: computes the experts; see `CardLayer`.
    """
    options = card.options
    has_operator = (card.is_plain(biases) and card.operators.mxfp4) or (
        options.limit is not None and not options.scales_inputs and card.operators.biased_mxfp4
    )
    stored = [_whole_blocks(weights) for weights in (gate, up, down)]
    if dtype != torch.bfloat16 or not has_operator or not all(stored):
        return None
    gates, ups, downs = stored
    pairs = (first.joined(second) for first, second in zip(gates, ups, strict=True))
    # All pairs can be joined or none, because they have the same kind of weights.
    both = [weight for weight in pairs if weight is not None]
    return HPUMxfp4Experts(both, downs, biases, card)


def _whole_blocks(weights: Sequence[StoredWeight]) -> list[Mxfp4Weight]:
    """Return the weights if all are MXFP4 in whole blocks, else an empty list.

    A rank may have only parts of blocks.
    """
    found = all_of(Mxfp4Weight, weights) or []
    return found if all(weight.blocks.shape[-1] == _BLOCK_BYTES for weight in found) else []


def _stacked(weights: Sequence[Mxfp4Weight]) -> tuple[Tensor, Tensor]:
    """Stack the weights as ([E, out, in / 2], [E, out, in / 32]), uint8."""
    blocks = torch.stack([weight.blocks.flatten(-2) for weight in weights])
    return blocks, torch.stack([weight.scales for weight in weights])


def _zeros(weight: Tensor) -> Tensor:
    """Make biases of zeros for weights [E, out, ...]: [E, out]."""
    return torch.zeros(weight.shape[:2], dtype=torch.bfloat16)


def _apart(x: Tensor, dim: int) -> Tensor:
    """Separate interleaved gates and ups along a dimension: the reverse of `in_turn`."""
    return x.unflatten(dim, (-1, 2)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def _parameter(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.contiguous(), requires_grad=False)
