"""Matmuls with static FP8 inputs on devices without FP8 matmuls.

Inputs are rounded to FP8 values, which every dtype of models represents exactly, and their scale is
multiplied into the scales of the weight. So the result equals an FP8 matmul, except for the order
of the sums.
"""

from dataclasses import replace
from typing import TypeGuard

import torch
from torch import Tensor

from vllm.ops.interface import Ops
from vllm.ops.prepared import PreparedWeight
from vllm.ops.stored_weight import Fp8Weight, StoredWeight


def is_rounding_inputs(weight: StoredWeight) -> TypeGuard[Fp8Weight]:
    """Return whether inputs must be rounded to FP8 for matmuls with this weight."""
    return isinstance(weight, Fp8Weight) and weight.rounds_inputs and weight.input_scale is not None


class RoundedInputs:
    """A `PreparedWeight` whose inputs are rounded to FP8 with one static scale.

    Args:
        weight: one for which `is_rounding_inputs` is true.
        ops: operators of the device.
        dtype: data type of the inputs.
    """

    def __init__(self, weight: Fp8Weight, ops: Ops, dtype: torch.dtype) -> None:
        assert weight.input_scale is not None
        self._ops = ops
        self._inverse_scale = 1 / weight.input_scale
        self._largest = int(weight.largest)
        scales = weight.scales * weight.input_scale
        plain = replace(weight, scales=scales, input_scale=None, rounds_inputs=False)
        self._weight = ops.prepare_weight(plain, dtype)

    @property
    def weight(self) -> PreparedWeight:
        """The weight that multiplies the rounded inputs."""
        return self._weight

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute x @ weight.T + bias after rounding x; see `PreparedWeight`."""
        rounded = self._ops.round_to_fp8(x, self._inverse_scale, self._largest)
        return self._weight.linear(rounded, bias)
