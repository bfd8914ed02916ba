"""Quantized weights on a Gaudi card: FP8 matmuls, and low-bit weights that are dequantized.

Weights are converted to the layout of the card on the host, while they are loaded. Shapes depend
only on the arguments, so a graph can capture every step.
"""

from collections.abc import Sequence
from functools import singledispatch
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.ops import get_ops
from vllm.ops.expert_options import ExpertBiases
from vllm.ops.hpu.experts import CardExperts, CardLayer
from vllm.ops.hpu.low_bit_weight import LowBitWeight, low_bit_weight
from vllm.ops.native.experts import sum_of_experts
from vllm.ops.stored_weight import Fp8Weight, StackedWeight, StoredWeight, round_to_fp8
from vllm.platforms.habana.kernels import FusedKernels

_GROUP = 32
"""Columns of a group, where groups of a weight differ in size."""
_TINY = 1e-8
"""Added to the largest input of a row, so that a row of zeros has a scale."""


class _Fp8Rows(NamedTuple):
    """An FP8 weight as the card multiplies with it: values and one scale per output feature."""

    numbers: Tensor
    """[out_features, in_features] float8_e4m3fn"""
    scales: Tensor
    """[out_features] float32"""
    input_scale: float | None


def _fp8_rows(weight: Fp8Weight, fp8_max: float) -> _Fp8Rows:
    """Convert an FP8 weight to values that the card supports, with one scale per output feature.

    Weights with a scale per block are rounded once more. On Gaudi 2, the largest e4m3 value is 240:
    there, weights with a larger range are halved and their scales doubled.
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
    """Quantize inputs [T, in_features] to FP8 of the card; return values and scales [T, 1] float32.

    The largest value of a token becomes the largest FP8 value of the card.
    """
    scale = (x.abs().amax(-1, keepdim=True).float() + _TINY) / fp8_max
    return kernels.cast_to_fp8(x, scale.reciprocal(), torch.float8_e4m3fn), scale


class HPUFp8Weight(nn.Module):
    """An FP8 weight with a scale per output feature, from `_fp8_rows`.

    Inputs are quantized to FP8: with the scale of the checkpoint, or with one scale per token.
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
        """Compute x @ weight.T + bias; see `PreparedWeight`."""
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


class HPUFp8Experts(CardLayer):
    """FP8 experts with a scale per output feature, from `_fp8_rows`.

    Inputs of both matmuls are quantized to FP8 with one scale per token; the checkpoint's scales of
    inputs are not used.

    Args:
        gate: gate projections; see `NativeOps.prepare_experts`.
        up: up projections; see `NativeOps.prepare_experts`.
        down: down projections; see `NativeOps.prepare_experts`.
        biases: biases; see `NativeOps.prepare_experts`.
        fp8_max: the largest e4m3 value of the card.
        card: computes the experts. Its FP8 operator supports only silu without biases; other
            experts are computed by one matmul after another.
    """

    def __init__(
        self,
        gate: Sequence[Fp8Weight],
        up: Sequence[Fp8Weight],
        down: Sequence[Fp8Weight],
        biases: ExpertBiases,
        fp8_max: float,
        card: CardExperts,
    ) -> None:
        super().__init__(card, biases)
        self._fp8_max = fp8_max
        gates, ups, downs = (
            [_fp8_rows(weight, fp8_max) for weight in weights] for weights in (gate, up, down)
        )
        firsts = (gates, ups) if card.options.has_gate else (ups,)
        both = [row for parts in zip(*firsts, strict=True) for row in parts]
        self.gate_up, self.gate_up_scale = self._stack(both, len(ups))
        self.down, self.down_scale = self._stack(downs, len(downs))

    def _stack(self, rows: Sequence[_Fp8Rows], num_experts: int) -> list[nn.Parameter]:
        """Stack values [num_experts, out_features, in_features] and scales [num_experts,
        out_features].

        FP8 values are stacked as bytes.
        """
        numbers = torch.cat([each.numbers.view(torch.uint8) for each in rows])
        scales = torch.cat([each.scales for each in rows])
        parts = (numbers.view(torch.float8_e4m3fn), scales)
        return [
            nn.Parameter(part.unflatten(0, (num_experts, -1)), requires_grad=False)
            for part in parts
        ]

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Compute the experts of each token; see `PreparedExperts`."""
        card = self._card
        if not (card.is_plain(self._biases) and card.can_fuse and card.operators.fp8):
            return sum_of_experts(
                *(get_ops(), x, topk_ids, topk_weights, len(self.down)),
                lambda expert, given: self._biased(
                    self.multiply_gate_up(expert, given), self.gate_up_bias, expert
                ),
                lambda expert, middle: self._biased(
                    self.multiply_down(expert, middle), self.down_bias, expert
                ),
                card.options,
            )
        numbers, scale = _round_rows(card.kernels, x, self._fp8_max)
        summed = card.kernels.fp8_moe(
            numbers,
            scale,
            topk_ids,
            topk_weights.to(torch.bfloat16),
            self.gate_up.unbind(0),
            self.gate_up_scale.unbind(0),
            self.down.unbind(0),
            self.down_scale.unbind(0),
            card.options.first_expert or 0,
        )
        return summed.to(x.dtype)

    def _biased(self, result: Tensor, bias: Tensor | None, expert: int) -> Tensor:
        return result if bias is None else result + bias[expert]

    def multiply_gate_up(self, expert: int, x: Tensor) -> Tensor:
        """Multiply x with gate and up of one expert; see `ExpertMatmuls`."""
        return self._multiply(self.gate_up[expert], self.gate_up_scale[expert], x)

    def multiply_down(self, expert: int, x: Tensor) -> Tensor:
        """Multiply x with down of one expert; see `ExpertMatmuls`."""
        return self._multiply(self.down[expert], self.down_scale[expert], x)

    def _multiply(self, weight: Tensor, weight_scale: Tensor, x: Tensor) -> Tensor:
        kernels = self._card.kernels
        numbers, scale = _round_rows(kernels, x, self._fp8_max)
        return kernels.fp8_gemm(numbers, weight, scale, weight_scale, x.dtype)


class HPUNarrowWeight(nn.Module):
    """A weight of 4 or 8 bits that is dequantized to the dtype of the inputs for each matmul.

    With `order`, columns were permuted while loading, and inputs are permuted for each matmul.

    Args:
        rows: the weight, one row for each of its columns.
        order: the input that each of its columns is for; None: unchanged.
    """

    def __init__(self, rows: LowBitWeight, order: Tensor | None) -> None:
        super().__init__()
        self.rows = rows
        self.register_parameter("order", None)
        if order is not None:
            self.order = nn.Parameter(order.int(), requires_grad=False)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute x @ weight.T + bias; see `PreparedWeight`."""
        weight = self.rows.widened(x.dtype)
        if self.order is not None:
            x = x.index_select(-1, self.order)
        return F.linear(x, weight.T, bias)


class HPUStackedWeight(nn.Module):
    """Several weights with the same inputs, whose outputs are concatenated; one matmul for each."""

    def __init__(self, parts: "Sequence[HPUWeight]") -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute x @ weight.T + bias for all weights; see `PreparedWeight`."""
        parts: list[Tensor] = [part.linear(x) for part in self.parts]  # type: ignore[operator]
        out = torch.cat(parts, dim=-1)
        return out if bias is None else out + bias


HPUWeight = HPUFp8Weight | HPUNarrowWeight | HPUStackedWeight
"""A quantized weight of a linear layer as the card multiplies with it."""


@singledispatch
def prepare_on_host(
    weight: StoredWeight, kernels: FusedKernels, fp8_max: float, dtype: torch.dtype
) -> HPUWeight | None:
    """Prepare a weight for the card, on the host; None if the card has no format for it.

    Args:
        weight: weight on the host.
        kernels: kernels of the card.
        fp8_max: the largest e4m3 value of the card.
        dtype: data type of the inputs.
    """
    even = weight.with_neighbours(_GROUP)
    if even is None:
        return None
    rows = low_bit_weight([even[0]], kernels, dtype)
    return None if rows is None else HPUNarrowWeight(rows, even[1])


@prepare_on_host.register
def _prepare_fp8(
    weight: Fp8Weight, kernels: FusedKernels, fp8_max: float, dtype: torch.dtype
) -> HPUWeight | None:
    return HPUFp8Weight(weight, kernels, fp8_max)


@prepare_on_host.register
def _prepare_stacked(
    weight: StackedWeight, kernels: FusedKernels, fp8_max: float, dtype: torch.dtype
) -> HPUWeight | None:
    parts = [prepare_on_host(part, kernels, fp8_max, dtype) for part in weight.parts]
    found = [part for part in parts if part is not None]
    return HPUStackedWeight(found) if len(found) == len(parts) else None
