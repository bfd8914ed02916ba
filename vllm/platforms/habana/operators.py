"""Call the operators of `torch.ops.hpu` for quantized weights, on a real or simulated card.

Signatures follow the bridge's documentation (`cast_to_fp8_v2`, `cast_from_fp8`, `fp8_gemm_v2`,
`convert_from_uint4`).
"""

from typing import Any

import torch
from torch import Tensor


class QuantizedKernels:
    """The kernels of `FusedKernels` for quantized weights."""

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
