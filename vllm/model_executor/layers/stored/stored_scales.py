"""Checks of the scales of quantized weights, for all formats."""

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from vllm.errors import WeightLoadError
from vllm.model_executor.layers.slice import CheckpointTensor, Index
from vllm.ops.stored_weight import Fp8Weight, GroupedWeight, Int8Weight

Scaled = TypeVar("Scaled", Fp8Weight, Int8Weight, GroupedWeight)


_LARGEST = 65504.0
"""Largest accepted scale: most formats have float16. No model was trained with the weights that
larger ones make."""


def checked_scales(name: str, source: CheckpointTensor) -> CheckpointTensor:
    """Return the scales as float32; every part is checked when it is read.

    Zeros are accepted: `without_zero_scales` checks later what they multiply.

    Args:
        name: name of the tensor, for errors.
        source: the scales.

    Reading raises:
        WeightLoadError: a scale is negative, or too large.
    """
    return _checked(name, source, zero_is_fine=True)


def _checked(name: str, source: CheckpointTensor, *, zero_is_fine: bool) -> CheckpointTensor:

    def read(index: Index) -> Tensor:
        scales = source.read(index).float()
        worst = next(
            (x for x in (scales.min(), scales.max()) if not _is_scale(float(x), zero_is_fine)), None
        )
        if worst is not None:
            raise WeightLoadError(
                f"tensor {name} contains {float(worst)}: scales are positive numbers of at most "
                f"{_LARGEST:g}"
            )
        return scales

    return replace(source, read=read, copy_to=None, dtype=torch.float32)


def one_scale(name: str, source: CheckpointTensor) -> CheckpointTensor:
    """Return a scale of a single value, as a tensor of shape [1].

    Raises:
        WeightLoadError: it has more than one value.
    """
    if source.shape.numel() != 1:
        raise WeightLoadError(f"tensor {name} has shape {list(source.shape)}, not one number")
    return _checked(name, source, zero_is_fine=False).mapped(lambda scale: scale.reshape(1))


def without_nan(name: str, numbers: Tensor) -> Tensor:
    """Check that e4m3 values contain no NaN, and return them. The format has no infinity.

    Args:
        name: name of the layer, for errors.
        numbers: float8_e4m3fn, of any shape.

    Raises:
        WeightLoadError: a value is NaN.
    """
    if bool((numbers.view(torch.uint8) & 0x7F == 0x7F).any()):
        raise WeightLoadError(f"the weight of {name} in the checkpoint contains NaN")
    return numbers


def without_zero_scales(name: str, weight: Scaled) -> Scaled:
    """Replace scales of 0 by 1, where all values that they multiply are 0.

    A quantizer may write 0 as the scale of such values. With other values a scale of 0 is a
    mistake, which would silently make the weights 0.

    Args:
        name: name of the layer, for errors.
        weight: whose scales are not negative.

    Raises:
        WeightLoadError: a scale is 0, and one of its values is not.
    """
    is_zero = weight.scales == 0
    if not bool(is_zero.any()):
        return weight
    lost = replace(weight, scales=is_zero.float()).dequantize()
    if bool(lost.any()):
        raise WeightLoadError(
            f"the scales of {name} in the checkpoint are 0, but its values are not: the file is "
            "damaged"
        )
    return replace(weight, scales=weight.scales.masked_fill(is_zero, 1.0))


def _is_scale(x: float, zero_is_fine: bool) -> bool:
    return x <= _LARGEST and (x > 0 or (zero_is_fine and x == 0))
