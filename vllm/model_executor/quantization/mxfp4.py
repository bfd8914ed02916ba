"""MXFP4, as published checkpoints of GPT-OSS have it: the experts in four bits, all else dense.

OCP Microscaling Formats (MX) Specification 1.0, 2023: a block of 32 numbers has elements of four
bits (E2M1: a sign, two bits of exponent, one of mantissa) and shares one scale of eight bits (E8M0:
a power of two). Such weights are dequantized while they are loaded, to the dtype of the model.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vllm.errors import WeightLoadError
from vllm.model_executor.quantization.interface import Quantization

_ELEMENTS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By their last three bits; the first one is the sign."""
_SCALE_BIAS = 127


class MXFP4(Quantization):
    """Leaves every layer dense: the model dequantizes its tensors as it reads them."""

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        del settings  # they name the modules that are dense, which the names of tensors say too


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """The numbers of some blocks.

    Args:
        blocks: [..., B, 16] uint8: two elements each, the first in the lower four bits.
        scales: [..., B] uint8: powers of two, 127 is 1.

    Returns:
        [..., B * 32] float32

    Raises:
        WeightLoadError: the shapes or dtypes do not fit each other.
    """
    is_bytes = blocks.dtype == scales.dtype == torch.uint8
    if not is_bytes or blocks.shape != (*scales.shape, 16):
        raise WeightLoadError(
            f"MXFP4 blocks are {blocks.dtype} {list(blocks.shape)} and scales {scales.dtype} "
            f"{list(scales.shape)}; they must be uint8, with 16 bytes of blocks for each scale"
        )
    table = torch.tensor([*_ELEMENTS, *(-x for x in _ELEMENTS)])
    nibbles = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.to(torch.int32) - _SCALE_BIAS
    return torch.ldexp(table[nibbles.int()], exponents.unsqueeze(-1)).flatten(-2)
