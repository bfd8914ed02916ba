"""Operators of `torch.ops.hpu` for quantized weights, the same for a card and the simulated one.

Signatures are those of the bridge's documentation (`cast_to_fp8_v2`, `cast_from_fp8`,
`fp8_gemm_v2`, `convert_from_uint4`).
"""

from typing import Any

import torch
from torch import Tensor


class QuantizedKernels:
    """The part of `FusedKernels` that multiplies with quantized weights."""

    def cast_to_fp8(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        hpu: Any = torch.ops.hpu
        out: Tensor = hpu.cast_to_fp8_v2(x, scale, False, False, dtype)[0]
        return out

    def cast_from_fp8(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        hpu: Any = torch.ops.hpu
        out: Tensor = hpu.cast_from_fp8(x, scale, dtype)
        return out

    def fp8_gemm(
        self, x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, dtype: torch.dtype
    ) -> Tensor:
        hpu: Any = torch.ops.hpu
        out: Tensor = hpu.fp8_gemm_v2(
            x, False, weight, True, None, dtype, x_scale, weight_scale, None, False
        )
        return out

    def from_uint4(
        self, words: Tensor, scales: Tensor, zeros: Tensor, dtype: torch.dtype
    ) -> Tensor:
        hpu: Any = torch.ops.hpu
        out: Tensor = hpu.convert_from_uint4(words, scales, zeros, dtype)
        return out
