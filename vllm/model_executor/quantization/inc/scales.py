"""Computes FP8 scales from largest absolute values, by the methods of Intel Neural Compressor.

Values are divided by the scale: largest / (range * backoff), rounded up to what the method allows.
Methods with "hw" use scales that the matrix engine applies for free: powers of two, of which Gaudi
2 has four. Independent of files and layers.
"""

import math

import torch
from torch import Tensor

from vllm.config.quantization.inc import Rounding, ScaleMethod
from vllm.cost_model.cards import CARDS
from vllm.ops.stored_weight import Fp8Weight

RANGES = {card.name: card.e4m3_max for card in CARDS.values()}
"""Largest value of e4m3 on each card."""

_HW_EXPONENTS = {RANGES["GAUDI2"]: (-8, -4, 0, 4), RANGES["GAUDI3"]: tuple(range(-55, 8))}
"""Range -> exponents of the scales that cost nothing."""

_SEARCHED = range(-3, 4)
"""Powers of two around the scale with which the largest number just fits."""


def input_scale(largest: float, method: ScaleMethod, limit: float, backoff: float) -> float:
    """Compute the scale of a layer's inputs.

    Args:
        largest: absolute value that was measured, above 0.
        method: how the scale is rounded.
        limit: the largest e4m3 value of the device.
        backoff: the fraction of the range that `largest` takes.
    """
    scales = torch.tensor([largest / (limit * backoff)], dtype=torch.float64)
    return float(_rounded(scales, method.inputs, limit))


def round_weight(
    weight: Tensor, method: ScaleMethod, limit: float, backoff: float, scales: Tensor | None = None
) -> Fp8Weight:
    """Quantize a dense weight [out_features, in_features] to FP8.

    Args:
        weight: not all zero, and finite.
        method: how scales are computed.
        limit: the largest e4m3 value of the device.
        backoff: the fraction of the range that the largest value takes; not used by methods that
            search for a scale.
        scales: [1] or [out_features] computed before; None: compute them.
    """
    num_out, num_in = weight.shape
    if scales is None:
        scales = weight_scales(weight, method, limit, backoff)
    column = scales.float().reshape(-1, 1).expand(num_out, 1).contiguous()
    return Fp8Weight(
        numbers=_to_e4m3(weight.float() / column, limit),
        scales=column,
        block_inputs=num_in,
        largest=limit,
    )


def weight_scales(weight: Tensor, method: ScaleMethod, limit: float, backoff: float) -> Tensor:
    """Compute the scales [1] or [out_features] float32 of a weight; see `round_weight`."""
    largest = weight.abs().amax(dim=1) if method.is_per_output else weight.abs().max().view(1)
    # An output with zero weights only: any scale would do.
    largest = torch.where(largest == 0, limit, largest.double())
    if not method.is_searched:
        return _rounded(largest / (limit * backoff), method.weights, limit).float()
    fitting = _rounded(largest / limit, method.weights, limit).float()
    best, least = fitting, torch.full_like(fitting, math.inf)
    for scales in _candidates(fitting, method.weights, limit):
        error = _squared_error(weight, scales, limit)
        best, least = torch.where(error < least, scales, best), torch.minimum(error, least)
    return best


def _candidates(fitting: Tensor, rounding: Rounding, limit: float) -> list[Tensor]:
    if rounding == "hw" and limit == RANGES["GAUDI2"]:
        return [torch.full_like(fitting, 2.0**e) for e in _HW_EXPONENTS[limit]]
    return [fitting * 2.0**shift for shift in _SEARCHED]


def _squared_error(weight: Tensor, scales: Tensor, limit: float) -> Tensor:
    """Compute the squared quantization error for each scale."""
    column = scales.view(-1, 1)
    error = (_to_e4m3(weight.float() / column, limit).float() * column - weight.float()).square()
    return error.sum(dim=1) if len(scales) > 1 else error.sum().view(1)


def _to_e4m3(x: Tensor, limit: float) -> Tensor:
    return x.clamp(-limit, limit).to(torch.float8_e4m3fn)


def _rounded(scales: Tensor, rounding: Rounding, limit: float) -> Tensor:
    if rounding == "unit":
        return torch.ones_like(scales)
    if rounding == "none":
        return scales
    exponents = scales.log2().ceil()
    if rounding == "hw":
        table = torch.tensor(_HW_EXPONENTS[limit], dtype=exponents.dtype)
        indices = torch.searchsorted(table, exponents).clamp(max=len(table) - 1)
        exponents = table[indices]
    return torch.exp2(exponents)
