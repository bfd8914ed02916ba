"""Quantized weights on a Gaudi card: FP8 products, and numbers of four bits.

Weights are brought into the layout of the card on the host, while they are loaded. Shapes depend on
the arguments alone, so that every step can be captured in a graph.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.ops.native_experts import choices_of
from vllm.ops.stored_weight import (
    Fp8Weight,
    GroupedWeight,
    StoredWeight,
    in_equal_groups,
    pack_nibbles,
    round_to_fp8,
)
from vllm.platforms.habana.bridge import FusedKernels

_GROUP = 32
"""Columns of a group, where groups of a weight of four bits differ in size."""
_TINY = 1e-8
"""Added to the largest input of a row, so that a row of zeros has a scale."""


def prepare_on_host(
    weight: StoredWeight, kernels: FusedKernels, fp8_max: float, dtype: torch.dtype
) -> "HPUFp8Weight | HPUUint4Weight | None":
    """The weight as the card multiplies with it, on the host; None: it has no such format.

    Args:
        weight: on the host.
        kernels: of the card.
        fp8_max: the largest number of its e4m3.
        dtype: of the inputs.
    """
    if isinstance(weight, Fp8Weight):
        return HPUFp8Weight(weight, kernels, fp8_max)
    if isinstance(weight, GroupedWeight) and weight.bits <= 4 and weight.shape[0] % 8 == 0:
        if not bool((weight.zeros < 16).all()):
            return None
        found: tuple[GroupedWeight, Tensor | None] | None = (weight, None)
        if weight.groups is not None:
            found = in_equal_groups(weight, _GROUP)
        return None if found is None else HPUUint4Weight(*found, kernels, dtype)
    return None


class _Fp8Rows(NamedTuple):
    """A weight as the card multiplies with it."""

    numbers: Tensor
    """[out_features, in_features] float8_e4m3fn"""
    scales: Tensor
    """[out_features] float32"""
    input_scale: float | None


def _fp8_rows(weight: Fp8Weight, fp8_max: float) -> _Fp8Rows:
    """Numbers that the card has, with one scale for each output feature.

    Blocks of scales are converted, which rounds once more. Where e4m3 ends at 240 (Gaudi 2),
    numbers of a wider range are halved and scales doubled.
    """
    input_scale = weight.input_scale
    if weight.scales.shape[1] > 1:
        weight = round_to_fp8(weight.dequantize())
    numbers, scales = weight.numbers, weight.scales[:, 0].clone()
    if fp8_max < weight.largest:
        numbers = (numbers.float() * 0.5).to(torch.float8_e4m3fn)
        scales *= 2
        input_scale = None if input_scale is None else 2 * input_scale
    return _Fp8Rows(numbers, scales, input_scale)


def _round_rows(kernels: FusedKernels, x: Tensor, fp8_max: float) -> tuple[Tensor, Tensor]:
    """Inputs [T, in_features] as numbers of the card, and what each row was divided by, [T, 1]
    float32: its largest number becomes the largest of the card."""
    scale = (x.abs().amax(-1, keepdim=True).float() + _TINY) / fp8_max
    return kernels.cast_to_fp8(x, scale.reciprocal(), torch.float8_e4m3fn), scale


class HPUFp8Weight(nn.Module):
    """fp8 numbers with a scale per output feature, as `_fp8_rows` makes them. Inputs are rounded to
    fp8: with the scale of the checkpoint, or with one for each row.
    """

    def __init__(self, weight: Fp8Weight, kernels: FusedKernels, fp8_max: float) -> None:
        super().__init__()
        self._kernels = kernels
        self.fp8_max = fp8_max
        numbers, scales, input_scale = _fp8_rows(weight, fp8_max)
        self.weight = nn.Parameter(numbers, requires_grad=False)
        self.weight_scale = nn.Parameter(scales, requires_grad=False)
        if input_scale is None:
            self.register_parameter("input_scale", None)
        else:
            self.input_scale = nn.Parameter(torch.tensor([input_scale]), requires_grad=False)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `PreparedWeight`."""
        rows = x.reshape(-1, x.shape[-1])
        scale: Tensor = self.input_scale
        if scale is None:
            numbers, scale = _round_rows(self._kernels, rows, self.fp8_max)
        else:
            numbers = self._kernels.cast_to_fp8(rows, scale.reciprocal(), torch.float8_e4m3fn)
        out = self._kernels.fp8_gemm(numbers, self.weight, scale, self.weight_scale, x.dtype)
        if bias is not None:
            out = out + bias
        return out.view(*x.shape[:-1], out.shape[-1])


class HPUFp8Experts(nn.Module):
    """Gated experts of fp8 numbers with a scale per output feature, as `_fp8_rows` makes them.

    Inputs of both products are rounded to fp8 with a scale for each row; scales of a checkpoint
    for its inputs are not used.

    Args:
        gate, up, down: see `Ops.prepare_experts`.
        kernels: of the card.
        fp8_max: the largest number of its e4m3.
        is_lazy: the operator of the card is not for plain eager mode.
        first_expert: see `Ops.moe`.
    """

    def __init__(
        self,
        gate: Sequence[Fp8Weight],
        up: Sequence[Fp8Weight],
        down: Sequence[Fp8Weight],
        kernels: FusedKernels,
        fp8_max: float,
        is_lazy: bool,
        first_expert: int | None,
    ) -> None:
        super().__init__()
        self._kernels, self._fp8_max, self._is_lazy = kernels, fp8_max, is_lazy
        self._first_expert = first_expert
        gates, ups, downs = (
            [_fp8_rows(weight, fp8_max) for weight in weights] for weights in (gate, up, down)
        )
        both = [row for pair in zip(gates, ups, strict=True) for row in pair]
        self.gate_up, self.gate_up_scale = self._stack(both, len(gates))
        self.down, self.down_scale = self._stack(downs, len(downs))

    def _stack(self, rows: Sequence[_Fp8Rows], num_experts: int) -> list[nn.Parameter]:
        """Numbers [num_experts, out_features, in_features] and scales [num_experts, out_features];
        fp8 is put together as bytes."""
        numbers = torch.cat([each.numbers.view(torch.uint8) for each in rows])
        scales = torch.cat([each.scales for each in rows])
        parts = (numbers.view(torch.float8_e4m3fn), scales)
        return [
            nn.Parameter(part.unflatten(0, (num_experts, -1)), requires_grad=False)
            for part in parts
        ]

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """See `PreparedExperts`."""
        kernels = self._kernels
        numbers, scale = _round_rows(kernels, x, self._fp8_max)
        can_run = self._is_lazy or torch.compiler.is_compiling()
        if can_run and kernels.has_fp8_moe:
            summed = kernels.fp8_moe(
                numbers,
                scale,
                topk_ids,
                topk_weights.to(torch.bfloat16),
                self.gate_up.unbind(0),
                self.gate_up_scale.unbind(0),
                self.down.unbind(0),
                self.down_scale.unbind(0),
                self._first_expert or 0,
            )
            return summed.to(x.dtype)
        out = torch.zeros_like(x, dtype=torch.float32)
        choices = choices_of(len(self.down), topk_ids, topk_weights, self._first_expert)
        for expert, (_, weight) in enumerate(choices):
            middle = kernels.fp8_gemm(
                numbers, self.gate_up[expert], scale, self.gate_up_scale[expert], x.dtype
            )
            gate, up = middle.chunk(2, dim=-1)
            out += weight * self.multiply_down(expert, F.silu(gate) * up)
        return out.to(x.dtype)

    def multiply_gate_up(self, expert: int, x: Tensor) -> Tensor:
        """See `ExpertProducts`."""
        return self._multiply(self.gate_up[expert], self.gate_up_scale[expert], x)

    def multiply_down(self, expert: int, x: Tensor) -> Tensor:
        """See `ExpertProducts`."""
        return self._multiply(self.down[expert], self.down_scale[expert], x)

    def _multiply(self, weight: Tensor, weight_scale: Tensor, x: Tensor) -> Tensor:
        numbers, scale = _round_rows(self._kernels, x, self._fp8_max)
        return self._kernels.fp8_gemm(numbers, weight, scale, weight_scale, x.dtype)


class HPUUint4Weight(nn.Module):
    """Numbers of four bits that are converted to the dtype of the inputs for each product.

    With an order, columns were permuted at load, and inputs are permuted for each product.

    Args:
        weight: whose groups have neighbours.
        order: the input that each of its columns is for; None: as they come.
        kernels: of the card.
        dtype: of the inputs.
    """

    def __init__(
        self,
        weight: GroupedWeight,
        order: Tensor | None,
        kernels: FusedKernels,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._kernels = kernels
        numbers = weight.numbers().T  # [in_features, out_features]
        self.register_parameter("order", None)
        if order is not None:
            self.order = nn.Parameter(order.int(), requires_grad=False)
        zeros = pack_nibbles(weight.zeros.to(torch.uint8))
        self.words = nn.Parameter(pack_nibbles(numbers.contiguous()), requires_grad=False)
        self.zeros = nn.Parameter(zeros, requires_grad=False)
        self.scales = nn.Parameter(weight.scales.to(dtype), requires_grad=False)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `PreparedWeight`."""
        weight = self._kernels.from_uint4(self.words, self.scales, self.zeros, x.dtype)
        if self.order is not None:
            x = x.index_select(-1, self.order)
        return F.linear(x, weight.T, bias)
