"""Reads scales, zero points and input order of int4 weights from GPTQ or AWQ checkpoints.

It checks their shapes; the quantized values themselves are converted by the C++ kernels. Knows no
files and no kernels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_BLOCK = 8
"""A group has a multiple of so many inputs, or all."""
# Numbers of inputs that share a scale; see csrc/cpu/linear_format.h.
_BLOCKS = (128, 64, 32, 16, SMALLEST_BLOCK)
NO_ZERO = 8
"""The zero point where the kernels are given none."""


@dataclass(frozen=True, kw_only=True)
class Int4Groups:
    """The groups of inputs of a weight [out_features, in_features], each with a scale."""

    shape: torch.Size
    """(out_features, in_features)"""

    scales: Tensor
    """[G, out_features] float32, dense."""

    zeros: Tensor | None
    """[G, out_features] uint8, 0 to 16, dense; None: all are 8."""

    order: Tensor | None
    """[in_features] int32: the inputs, group by group; None: as they come."""

    group_inputs: int
    """Inputs of a group."""

    block_inputs: int
    """Inputs that share a scale in the kernels: the largest size that divides a group."""


def order_of(groups: Tensor) -> Tensor | None:
    """Return the order [in_features] int32 that sorts inputs by group; None if they are sorted."""
    if (groups[1:] >= groups[:-1]).all():
        return None
    return groups.argsort(stable=True).int()


def make_groups(
    shape: torch.Size, qweight: Tensor, scales: Tensor, zeros: Tensor, order: Tensor | None
) -> Int4Groups:
    """Build the groups of a weight whose words are in the layout of GPTQ or AWQ.

    Args:
        shape: (out_features, in_features).
        qweight: the words, to be checked.
        scales: [G, out_features].
        zeros: [G, out_features] uint8.
        order: order of the inputs; None: unchanged.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    num_out, num_in = shape
    if qweight.dtype != torch.int32 or not qweight.is_contiguous() or not qweight.is_cpu:
        raise ValueError(
            f"qweight must be dense torch.int32 on cpu, got {qweight.dtype} {list(qweight.shape)} "
            f"with strides {list(qweight.stride())} on {qweight.device}"
        )
    if qweight.dim() != 2 or qweight.numel() == 0 or scales.dim() != 2 or not scales.is_cpu:
        raise ValueError(
            f"qweight and scales must be two matrices on cpu, got {list(qweight.shape)} and "
            f"{list(scales.shape)} on {scales.device}"
        )
    num_groups = len(scales)
    if scales.shape != (num_groups, num_out) or zeros.shape != scales.shape or num_out % 8:
        raise ValueError(
            f"scales and zero points must fit {num_out} outputs, got {list(scales.shape)} and "
            f"{list(zeros.shape)}"
        )
    if num_groups == 0 or num_in % num_groups or num_in % 8:
        raise ValueError(
            f"{num_in} inputs cannot be divided into {num_groups} groups of equal size"
        )
    group_inputs = num_in // num_groups
    fitting = [b for b in _BLOCKS if num_groups == 1 or group_inputs % b == 0]
    if not fitting:
        raise ValueError(
            f"a group must have a multiple of {SMALLEST_BLOCK} inputs, or all inputs must be one "
            f"group; got groups of {group_inputs}"
        )
    return Int4Groups(
        shape=shape,
        scales=scales.float().contiguous(),
        zeros=None if (zeros == NO_ZERO).all() else zeros.contiguous(),
        order=order,
        group_inputs=group_inputs,
        block_inputs=fitting[0],
    )
