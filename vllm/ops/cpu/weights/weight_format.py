"""The formats in which the C++ kernels store the weights of linear layers."""

from enum import Enum

import torch
from torch import Tensor

from vllm.ops.cpu.library import load_cpu_kernels

MAX_INT8_INPUTS = 65_000
"""255 * 128 * inputs stays below 2^31."""


class WeightFormat(Enum):
    """Storage format of a weight; the values are the names in csrc/cpu/linear_format.h."""

    FLOAT32 = "kFloat"
    BFLOAT16 = "kBf16"
    INT8 = "kInt8"
    """One scale per output feature; inputs are rounded to int8 too, with one scale per row."""
    INT4 = "kInt4"
    """One float16 scale, and a zero point or none, per block of 8 to 128 inputs of an output
    feature; inputs are rounded to int8 in the same blocks."""
    FP8 = "kFp8"
    """float8_e4m3fn with a scale per block of inputs of an output feature. Inputs are not rounded,
    and weights are converted exactly."""
    UINT8 = "kUint8"
    """Integers from 0 to 255 with a zero point and a scale per block of inputs of an output
    feature; otherwise like FP8."""
    TABLE4 = "kTable4"
    """Codes of four bits, each an index of a table of 16 bf16, with a scale per block of inputs of
    an output feature; the rest as FP8."""
    MXFP4 = "kMxfp4"
    """Elements of E2M1 with a power of two per 32 inputs, as float16; inputs as with INT4."""
    INT4_MINIMUMS = "kInt4Minimums"
    """Numbers from 0 to 15 times a scale, less a minimum, both for 16 or 32 inputs of an output
    feature; inputs as with INT4."""
    INT5_MINIMUMS = "kInt5Minimums"
    """Integers up to 31 with a scale and a minimum, for 32 inputs."""

    @property
    def inputs_per_word(self) -> int:
        """Number that in_features must be a multiple of."""
        if self.has_int4_blocks or self is WeightFormat.TABLE4:
            return 8
        return {"kFloat": 1, "kBf16": 2}.get(self.value, 4)

    @property
    def has_int4_blocks(self) -> bool:
        """Whether values of 4 or 5 bits are stored in blocks together with their scales."""
        return self.value in ("kInt4", "kMxfp4", "kInt4Minimums", "kInt5Minimums")


DENSE_FORMATS = {torch.float32: WeightFormat.FLOAT32, torch.bfloat16: WeightFormat.BFLOAT16}


def can_pack(weight: Tensor, weight_format: WeightFormat | None = None) -> bool:
    """Return whether a dense weight [out_features, in_features] can be stored in a format.

    Args:
        weight: weight of any device and dtype.
        weight_format: None: the weight's own dtype.
    """
    own = DENSE_FORMATS.get(weight.dtype)
    if load_cpu_kernels() is None or own is None or weight.device.type != "cpu":
        return False
    wanted = own if weight_format is None else weight_format
    in_features = weight.shape[1]
    fits = wanted is not WeightFormat.INT8 or in_features <= MAX_INT8_INPUTS
    return fits and in_features > 0 and in_features % wanted.inputs_per_word == 0
