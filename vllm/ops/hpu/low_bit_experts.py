"""Experts of 4 and 8 bits on a Gaudi card, dequantized in each forward pass.

The operator for experts multiplies bf16 or FP8. So the weights of a layer are converted to the
dtype of its inputs before it, in each forward pass: in memory they stay small, and only one layer
at a time is dequantized. Shapes depend only on the arguments.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from vllm.ops.expert_options import ExpertBiases
from vllm.ops.hpu.experts import CardExperts, CardLayer
from vllm.ops.hpu.low_bit_weight import LowBitWeight, low_bit_weight
from vllm.ops.stored_weight import StoredWeight


class HPULowBitExperts(CardLayer):
    """Experts whose weights have 4 or 8 bits.

    Args:
        gate_up: gate and up projections of all experts, gate then up, or only up.
        down: down projections of all experts.
        biases: biases; see `CardLayer`.
        card: computes the experts; see `CardLayer`.
    """

    def __init__(
        self, gate_up: "_NarrowStack", down: "_NarrowStack", biases: ExpertBiases, card: CardExperts
    ) -> None:
        super().__init__(card, biases)
        self.gate_up, self.down = gate_up, down

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Compute the experts of each token; see `PreparedExperts`."""
        gate_up, down = (each.dense(x.dtype) for each in (self.gate_up, self.down))
        return self._card.moe(
            *(x, topk_ids, topk_weights, gate_up, down, self._biases), has_inputs_first=True
        )

    def multiply_gate_up(self, expert: int, x: Tensor) -> Tensor:
        """Multiply x with gate and up of one expert; see `ExpertMatmuls`."""
        return x @ self.gate_up.of_expert(expert, x.dtype)

    def multiply_down(self, expert: int, x: Tensor) -> Tensor:
        """Multiply x with down of one expert; see `ExpertMatmuls`."""
        return x @ self.down.of_expert(expert, x.dtype)


def prepare_narrow_experts(
    gate: Sequence[StoredWeight],
    up: Sequence[StoredWeight],
    down: Sequence[StoredWeight],
    dtype: torch.dtype,
    biases: ExpertBiases,
    card: CardExperts,
) -> HPULowBitExperts | None:
    """Prepare low-bit experts for the card; None if it only supports them dequantized.

    Args:
        gate: gate projections; see `NativeOps.prepare_experts`.
        up: up projections; see `NativeOps.prepare_experts`.
        down: down projections; see `NativeOps.prepare_experts`.
        dtype: data type of the inputs.
        biases: biases; see `CardLayer`.
        card: computes the experts; see `CardLayer`.
    """
    both: Sequence[StoredWeight | None] = up
    if card.options.has_gate:
        both = [_side_by_side(*pair) for pair in zip(gate, up, strict=True)]
    stacks = [_stack(weights, card, dtype) for weights in (both, down)]
    if stacks[0] is None or stacks[1] is None:
        return None
    return HPULowBitExperts(stacks[0], stacks[1], biases, card)


def _side_by_side(gate: StoredWeight, up: StoredWeight) -> StoredWeight | None:
    """Join gate and up into one weight; None if their formats or groups differ."""
    return (gate.as_grouped() or gate).joined(up.as_grouped() or up)


def _stack(
    weights: Sequence[StoredWeight | None], card: CardExperts, dtype: torch.dtype
) -> "_NarrowStack | None":
    num_in = weights[0].shape[1] if weights[0] is not None else 0
    in_groups: list[StoredWeight] = []
    columns = []
    for number, weight in enumerate(weights):
        if weight is None:
            return None
        found = (weight.as_grouped() or weight).with_neighbours(None)
        if found is None:
            return None
        in_groups.append(found[0])
        order = found[1]
        column = torch.arange(num_in) if order is None else order.argsort()
        columns.append(column + number * num_in)
    rows = low_bit_weight(in_groups, card.kernels, dtype)
    return None if rows is None else _NarrowStack(rows, columns)


class _NarrowStack(nn.Module):
    """One low-bit matrix of each of E experts, in one tensor.

    If the inputs of a group are not neighbours, they are sorted by group in memory, and reordered
    when they are dequantized.

    Args:
        rows: the matrices of the experts, one after another.
        columns: for each expert, index of the row of each of its inputs [in].
    """

    def __init__(self, rows: LowBitWeight, columns: Sequence[Tensor]) -> None:
        super().__init__()
        self.rows, self.num_experts = rows, len(columns)
        self.register_parameter("columns", None)
        all_columns = torch.cat(list(columns))
        if not torch.equal(all_columns, torch.arange(len(all_columns))):
            self.columns = nn.Parameter(all_columns.int(), requires_grad=False)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Dequantize the matrices of all experts, [E, in, out]."""
        rows = self.rows.widened(dtype)
        if self.columns is not None:
            rows = rows.index_select(0, self.columns)
        return rows.unflatten(0, (self.num_experts, -1))

    def of_expert(self, expert: int, dtype: torch.dtype) -> Tensor:
        """Dequantize the matrix [in, out] of one expert."""
        rows = self.rows.widened(dtype, partial(self._part, expert))
        if self.columns is not None:
            rows = rows.index_select(0, self._part(expert, self.columns) - expert * len(rows))
        return rows

    def _part(self, expert: int, kept: Tensor) -> Tensor:
        return kept.unflatten(0, (self.num_experts, -1))[expert]
