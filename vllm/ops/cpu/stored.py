"""From the weights of quantized checkpoints to the layout of the C++ kernels. Values are kept."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm.ops.cpu.int4_layouts import make_groups, order_of
from vllm.ops.cpu.linear import MAX_INT8_INPUTS, ByteGroups, PackedWeight, WeightFormat
from vllm.ops.cpu.moe import PackedExperts
from vllm.ops.stored_weight import Fp8Weight, GroupedWeight, Int8Weight, StoredWeight, pack_nibbles

_STRETCH = 128
"""Inputs of bytes that are widened at a time, csrc/cpu/linear_bytes.h."""
_INT4_BLOCK = 32
"""A group of int4 has a multiple of so many inputs, or all."""


def pack_stored(weight: StoredWeight) -> PackedWeight | None:
    """The weight as the kernels read it; None: no kernel multiplies with it.

    Raises:
        ValueError: the groups of its inputs are wrong.
        MemoryError: there is no scratch memory.
    """
    num_in = weight.shape[1]
    if isinstance(weight, Fp8Weight) and _has_blocks(weight.block_inputs, num_in):
        groups = ByteGroups(scales=weight.scales.T, block_inputs=min(weight.block_inputs, num_in))
        return PackedWeight.from_bytes(WeightFormat.FP8, weight.numbers.view(torch.uint8), groups)
    if isinstance(weight, Int8Weight) and num_in % 4 == 0 and num_in <= MAX_INT8_INPUTS:
        return PackedWeight.from_int8(weight.numbers, weight.scales)
    if isinstance(weight, GroupedWeight):
        order = None
        if weight.groups is not None:
            order = order_of(weight.groups, num_in, len(weight.scales))
        if _is_int4(weight):
            return _pack_int4(weight, order)
        if _has_blocks(num_in // len(weight.scales), num_in):
            return _pack_uint8(weight, order)
    return None


def pack_stored_experts(
    gate: Sequence[StoredWeight],
    up: Sequence[StoredWeight],
    down: Sequence[StoredWeight],
    first_expert: int | None = None,
) -> PackedExperts | None:
    """Gated experts as the kernels read them; None: no kernel multiplies with them.

    Args: see `Ops.prepare_experts`.

    Raises:
        ValueError: experts are stored in different ways, or their groups are wrong.
        MemoryError: there is no scratch memory.
    """
    packed: list[list[PackedWeight]] = []
    for weights in (gate, up, down):
        packed.append([])
        for weight in weights:
            one = pack_stored(weight)
            if one is None:
                return None
            packed[-1].append(one)
    gates, ups, downs = packed
    return PackedExperts(gates, ups, downs, first_expert=first_expert)


def _has_blocks(block_inputs: int, num_in: int) -> bool:
    """Whether the kernels have scales of so many inputs."""
    fits = block_inputs % _STRETCH == 0 or (_STRETCH % block_inputs == 0 and block_inputs % 4 == 0)
    return num_in % 4 == 0 and (block_inputs >= num_in or fits)


def _is_int4(weight: GroupedWeight) -> bool:
    """Whether the kernels of int4 take the weight as it is, with scales of float16."""
    num_out, num_in = weight.shape
    group = num_in // len(weight.scales)
    fits = group % _INT4_BLOCK == 0 or (len(weight.scales) == 1 and num_in % 8 == 0)
    if weight.bits > 4 or num_out % 8 or not fits:
        return False
    # The kernels divide the scales of an output by a power of two, for more room in float16.
    exponent = weight.scales.abs().amax(0).frexp().exponent
    divided = torch.ldexp(weight.scales, 1 - exponent)
    return torch.equal(divided.half().float(), divided)


def _pack_int4(weight: GroupedWeight, order: Tensor | None) -> PackedWeight:
    words = weight.words
    if weight.bits < 4:
        words = pack_nibbles(weight.numbers()).T.contiguous()
    groups = make_groups(weight.shape, words, weight.scales, weight.zeros.to(torch.uint8), order)
    return PackedWeight.from_groups(words, groups, weight.is_awq)


def _pack_uint8(weight: GroupedWeight, order: Tensor | None) -> PackedWeight:
    numbers = weight.numbers()
    groups = ByteGroups(
        scales=weight.scales,
        zeros=weight.zeros,
        order=order,
        block_inputs=weight.shape[1] // len(weight.scales),
    )
    codes = numbers if order is None else numbers[:, order.long()]
    return PackedWeight.from_bytes(WeightFormat.UINT8, codes, groups)
