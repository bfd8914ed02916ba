"""Quantized weights on a Gaudi card: FP8 products, and numbers of four bits.

Weights are brought into the layout of the card on the host, while they are loaded. Shapes depend on
the arguments alone, so that every step can be captured in a graph.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.ops.stored_weight import (
    Fp8Weight,
    GroupedWeight,
    StoredWeight,
    pack_nibbles,
    round_to_fp8,
)
from vllm.platforms.habana.bridge import FusedKernels

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
        return HPUUint4Weight(weight, kernels, dtype) if bool((weight.zeros < 16).all()) else None
    return None


class HPUFp8Weight(nn.Module):
    """fp8 numbers with a scale per output feature. Inputs are rounded to fp8: with the scale of the
    checkpoint, or with one for each row.

    Blocks of scales are converted to one scale per output feature, which rounds once more. Where
    e4m3 ends at 240 (Gaudi 2), numbers of a wider range are halved and scales doubled.
    """

    def __init__(self, weight: Fp8Weight, kernels: FusedKernels, fp8_max: float) -> None:
        super().__init__()
        self._kernels = kernels
        self.fp8_max = fp8_max
        if weight.scales.shape[1] > 1:
            input_scale = weight.input_scale
            weight = round_to_fp8(weight.dequantize())
        else:
            input_scale = weight.input_scale
        numbers, scales = weight.numbers, weight.scales[:, 0].clone()
        if fp8_max < weight.largest:
            numbers = (numbers.float() * 0.5).to(torch.float8_e4m3fn)
            scales *= 2
            input_scale = None if input_scale is None else 2 * input_scale
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
            scale = (rows.abs().amax(-1, keepdim=True).float() + _TINY) / self.fp8_max
        numbers = self._kernels.cast_to_fp8(rows, scale.reciprocal(), torch.float8_e4m3fn)
        out = self._kernels.fp8_gemm(numbers, self.weight, scale, self.weight_scale, x.dtype)
        if bias is not None:
            out = out + bias
        return out.view(*x.shape[:-1], out.shape[-1])


class HPUUint4Weight(nn.Module):
    """Numbers of four bits that are converted to the dtype of the inputs for each product.

    With an order, columns were permuted at load, and inputs are permuted for each product.
    """

    def __init__(self, weight: GroupedWeight, kernels: FusedKernels, dtype: torch.dtype) -> None:
        super().__init__()
        self._kernels = kernels
        numbers = weight.numbers().T  # [in_features, out_features]
        self.register_parameter("order", None)
        if weight.groups is not None:
            order = weight.groups.long().argsort(stable=True)
            numbers = numbers[order]
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
