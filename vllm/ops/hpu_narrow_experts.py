"""Experts of 4 and 8 bits on a Gaudi card, which are widened for each launch.

The operator for experts multiplies bf16 or fp8. So the weights of a layer are converted to the
dtype of its inputs before it, in each launch: what stays in memory is narrow, and one layer at a
time is wide. Shapes depend on the arguments alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from vllm.ops.native import NativeOps
from vllm.ops.stored_weight import (
    GroupedWeight,
    Int8Weight,
    StoredWeight,
    has_equal_groups,
    in_equal_groups,
    pack_nibbles,
)
from vllm.platforms.habana.bridge import FusedKernels

_BYTE_MIDDLE = 128
"""Bytes less so much are int8, which the card converts."""


class HPUNarrowExperts(nn.Module):
    """Gated experts of whole numbers of 4 or 8 bits.

    Args:
        gate_up: of all experts, gate then up.
        down: of all experts.
        kernels: of the card.
        is_lazy: the operator of the card is not for plain eager mode.
        first_expert: see `Ops.moe`.
    """

    def __init__(
        self,
        gate_up: "_NarrowStack",
        down: "_NarrowStack",
        kernels: FusedKernels,
        is_lazy: bool,
        first_expert: int | None,
    ) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down
        self._kernels, self._is_lazy, self._first_expert = kernels, is_lazy, first_expert

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """See `PreparedExperts`."""
        gate_up, down = (each.dense(x.dtype) for each in (self.gate_up, self.down))
        can_run = self._is_lazy or torch.compiler.is_compiling()
        if not (can_run and self._kernels.has_moe):
            return NativeOps().moe(
                *(x, topk_ids, topk_weights, gate_up.mT, down.mT), first_expert=self._first_expert
            )
        return self._kernels.moe(
            *(x, topk_ids, topk_weights.to(x.dtype), gate_up.unbind(0), down.unbind(0)),
            self._first_expert or 0,
            has_inputs_first=True,
        )

    def multiply_gate_up(self, expert: int, x: Tensor) -> Tensor:
        """See `ExpertProducts`."""
        return x @ self.gate_up.of_expert(expert, x.dtype)

    def multiply_down(self, expert: int, x: Tensor) -> Tensor:
        """See `ExpertProducts`."""
        return x @ self.down.of_expert(expert, x.dtype)


def prepare_narrow_experts(
    gate: Sequence[StoredWeight],
    up: Sequence[StoredWeight],
    down: Sequence[StoredWeight],
    dtype: torch.dtype,
    kernels: FusedKernels,
    is_lazy: bool,
    first_expert: int | None,
) -> HPUNarrowExperts | None:
    """The experts as the card has them; None: it has them in the dtype of the inputs only.

    Args:
        gate, up, down: see `Ops.prepare_experts`.
        dtype: of the inputs.
        kernels, is_lazy, first_expert: see `HPUNarrowExperts`.
    """
    gates, ups, downs = ([_grouped(weight) for weight in each] for each in (gate, up, down))
    both = [_side_by_side(*pair) for pair in zip(gates, ups, strict=True)]
    stacks = [_stack(weights, kernels, dtype) for weights in (both, downs)]
    if stacks[0] is None or stacks[1] is None:
        return None
    return HPUNarrowExperts(stacks[0], stacks[1], kernels, is_lazy, first_expert)


def _grouped(weight: StoredWeight) -> GroupedWeight | None:
    """int8 with a scale per output feature is one group without a zero point."""
    if isinstance(weight, Int8Weight) and weight.shape[1] % 4 == 0:
        codes = weight.numbers.view(torch.uint8) ^ _BYTE_MIDDLE
        return GroupedWeight(
            words=codes.view(torch.int32).T.contiguous(),
            bits=8,
            scales=weight.scales[None],
            zeros=torch.full((1, len(codes)), _BYTE_MIDDLE, dtype=torch.int16),
        )
    return weight if isinstance(weight, GroupedWeight) and has_equal_groups(weight) else None


def _side_by_side(gate: GroupedWeight | None, up: GroupedWeight | None) -> GroupedWeight | None:
    """Gate and up as one weight; None: they have other groups."""
    if gate is None or up is None or gate.scales.shape != up.scales.shape:
        return None
    orders = (gate.groups, up.groups)
    is_same = orders == (None, None) or (
        orders[0] is not None and orders[1] is not None and torch.equal(orders[0], orders[1])
    )
    if not is_same or (gate.bits, gate.is_awq) != (up.bits, up.is_awq):
        return None
    words, scales, zeros = (
        torch.cat(pair, dim=1)
        for pair in ((gate.words, up.words), (gate.scales, up.scales), (gate.zeros, up.zeros))
    )
    return replace(gate, words=words, scales=scales, zeros=zeros)


def _stack(
    weights: Sequence[GroupedWeight | None], kernels: FusedKernels, dtype: torch.dtype
) -> "_NarrowStack | None":
    found = [weight for weight in weights if weight is not None]
    kinds = {(weight.bits > 4, weight.shape, weight.scales.shape) for weight in found}
    if len(found) < len(weights) or len(kinds) > 1:
        return None
    is_wide = found[0].bits > 4
    if is_wide:
        return _ByteStack(found)
    fits = found[0].shape[0] % 8 == 0 and all(bool((w.zeros < 16).all()) for w in found)
    return _NibbleStack(found, kernels, dtype) if fits else None


class _NarrowStack(nn.Module, ABC):
    """One product of E experts, with inputs in rows. Inputs that a group has from everywhere are
    neighbours in memory, and come back to their places when they are widened."""

    def __init__(self, weights: Sequence[GroupedWeight]) -> None:
        super().__init__()
        self.num_experts = len(weights)
        self._sorted: list[GroupedWeight] = []
        places = []
        for number, weight in enumerate(weights):
            num_in = weight.shape[1]
            place = torch.arange(num_in)
            if weight.groups is not None:
                even = in_equal_groups(weight, num_in)
                assert even is not None, "no columns are added to equal groups"
                weight, order = even
                place = order.argsort()
            self._sorted.append(weight)
            places.append(place + number * num_in)
        self.register_parameter("places", None)
        all_places = torch.cat(places)
        if not torch.equal(all_places, torch.arange(len(all_places))):
            self.places = nn.Parameter(all_places.int(), requires_grad=False)

    def _rows(self) -> Tensor:
        """The numbers of all experts, [E * in, out] uint8; the weights themselves are let go."""
        rows = torch.cat([weight.numbers().T for weight in self._sorted])
        self._sorted = []
        return rows

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[E, in, out]"""
        rows = self.widened(dtype, lambda kept: kept)
        if self.places is not None:
            rows = rows.index_select(0, self.places)
        return rows.unflatten(0, (self.num_experts, -1))

    def of_expert(self, expert: int, dtype: torch.dtype) -> Tensor:
        """[in, out] of the expert of this number."""
        rows = self.widened(dtype, partial(self._part, expert))
        if self.places is not None:
            rows = rows.index_select(0, self._part(expert, self.places) - expert * len(rows))
        return rows

    def _part(self, expert: int, kept: Tensor) -> Tensor:
        return kept.unflatten(0, (self.num_experts, -1))[expert]

    @abstractmethod
    def widened(self, dtype: torch.dtype, part: Callable[[Tensor], Tensor]) -> Tensor:
        """[E * in, out], inputs sorted by group; `part` takes those of one expert, or all."""


class _NibbleStack(_NarrowStack):
    """Of 4 bits, by `convert_from_uint4`."""

    def __init__(
        self, weights: Sequence[GroupedWeight], kernels: FusedKernels, dtype: torch.dtype
    ) -> None:
        super().__init__(weights)
        self._kernels = kernels
        scales = torch.cat([weight.scales for weight in self._sorted]).to(dtype)
        zeros = torch.cat([weight.zeros for weight in self._sorted]).to(torch.uint8)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.zeros = nn.Parameter(pack_nibbles(zeros), requires_grad=False)
        self.words = nn.Parameter(pack_nibbles(self._rows().contiguous()), requires_grad=False)

    def widened(self, dtype: torch.dtype, part: Callable[[Tensor], Tensor]) -> Tensor:
        words, scales, zeros = (part(each) for each in (self.words, self.scales, self.zeros))
        return self._kernels.from_uint4(words, scales, zeros, dtype)


class _ByteStack(_NarrowStack):
    """Of 8 bits, by operators of torch in float32."""

    def __init__(self, weights: Sequence[GroupedWeight]) -> None:
        super().__init__(weights)
        scales = torch.cat([weight.scales for weight in self._sorted])
        zeros = torch.cat([weight.zeros for weight in self._sorted]) - _BYTE_MIDDLE
        self.scales = nn.Parameter(scales[:, None], requires_grad=False)
        self.register_parameter("zeros", None)
        if bool(zeros.any()):
            self.zeros = nn.Parameter(zeros.float()[:, None], requires_grad=False)
        numbers = (self._rows().contiguous() ^ _BYTE_MIDDLE).view(torch.int8)
        grouped = numbers.unflatten(0, (len(scales), -1))
        self.numbers = nn.Parameter(grouped, requires_grad=False)
        """[E * G, inputs of a group, out]"""

    def widened(self, dtype: torch.dtype, part: Callable[[Tensor], Tensor]) -> Tensor:
        numbers = part(self.numbers).float()
        if self.zeros is not None:
            numbers = numbers - part(self.zeros)
        return (numbers * part(self.scales)).flatten(0, 1).to(dtype)
