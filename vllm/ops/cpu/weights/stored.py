"""Converts the weights of quantized checkpoints to the layout of the C++ kernels, losslessly."""

from collections.abc import Sequence
from functools import singledispatch

import torch
from torch import Tensor

from vllm.ops.cpu.weights.int4_layouts import NO_ZERO, SMALLEST_BLOCK, make_groups, order_of
from vllm.ops.cpu.weights.int4_minimums import FACTOR_INPUTS
from vllm.ops.cpu.weights.linear import ByteGroups, PackedWeight
from vllm.ops.cpu.weights.moe import PackedExperts
from vllm.ops.cpu.weights.weight_format import MAX_INT8_INPUTS, WeightFormat, can_pack
from vllm.ops.expert_options import NO_BIASES, SILU_EXPERTS, ExpertBiases, ExpertOptions
from vllm.ops.stored_weight import (
    DenseValues,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    MinimumWeight,
    Mxfp4Weight,
    Nvfp4Weight,
    StackedWeight,
    StoredWeight,
    TableWeight,
    pack_nibbles,
)

_WIDENED_INPUTS = 128
"""Inputs of bytes that a kernel converts at a time: kWidenedInputs of csrc/cpu/linear_bytes.h."""
_UNEQUAL_BLOCK = 32
"""Inputs of each part that groups of different sizes are divided into."""


@singledispatch
def pack_stored(weight: StoredWeight) -> PackedWeight | None:
    """Pack a quantized weight for the kernels; None if no kernel supports it.

    Raises:
        ValueError: the groups of its inputs are wrong.
        MemoryError: there is no scratch memory.
    """
    return None


def pack_stored_experts(
    gate: Sequence[StoredWeight],
    up: Sequence[StoredWeight],
    down: Sequence[StoredWeight],
    biases: ExpertBiases = NO_BIASES,
    options: ExpertOptions = SILU_EXPERTS,
) -> PackedExperts | None:
    """Pack quantized experts for the kernels; None if no kernel supports them.

    For the arguments see `NativeOps.prepare_experts`.

    Raises:
        ValueError: experts are stored in different formats, or their groups are wrong.
        MemoryError: there is no scratch memory.
    """
    packed: list[list[PackedWeight]] = []
    for weights in (gate, up, down):
        packed.append([])
        for weight in weights:
            one = pack_stored(weight)
            if one is None or one.num_inputs != one.in_features:
                return None
            packed[-1].append(one)
    gates, ups, downs = packed
    return PackedExperts(gates if options.has_gate else ups, ups, downs, biases, options)


def _has_blocks(block_inputs: int, num_in: int) -> bool:
    """Return whether the kernels support scales of blocks of this many inputs."""
    fits = block_inputs % _WIDENED_INPUTS == 0 or (
        _WIDENED_INPUTS % block_inputs == 0 and block_inputs % 4 == 0
    )
    return num_in % 4 == 0 and (block_inputs >= num_in or fits)


def _is_int4(weight: GroupedWeight) -> bool:
    """Return whether the int4 kernels support the weight without loss, with float16 scales."""
    num_out, num_in = weight.shape
    group = num_in // len(weight.scales)
    fits = group % SMALLEST_BLOCK == 0 or (len(weight.scales) == 1 and num_in % 8 == 0)
    if weight.bits > 4 or num_out % 8 or not fits:
        return False
    return _are_halves(weight.scales)


def _are_halves(scales: Tensor) -> bool:
    """Return whether scales [G, out_features] are exact in float16.

    The kernels divide the scales of an output by a power of two first, to fit the range.
    """
    exponent = scales.abs().amax(0).frexp().exponent
    divided = torch.ldexp(scales, 1 - exponent)
    return torch.equal(divided.half().float(), divided)


def _has_factors(weight: MinimumWeight) -> bool:
    """Return whether the kernels support the group sizes of its scales and minimums."""
    num_in = weight.shape[1]
    num_blocks, num_factors = weight.scales.multipliers.shape[1], weight.scales.factors.shape[1]
    sizes = (32,) if weight.bits == 5 else (16, 32)
    return num_in // num_blocks in sizes and FACTOR_INPUTS % (num_in // num_factors) == 0


@pack_stored.register
def _pack_fp8(weight: Fp8Weight) -> PackedWeight | None:
    num_in = weight.shape[1]
    if not _has_blocks(weight.block_inputs, num_in):
        return None
    groups = ByteGroups(scales=weight.scales.T, block_inputs=min(weight.block_inputs, num_in))
    return PackedWeight.from_bytes(WeightFormat.FP8, weight.numbers.view(torch.uint8), groups)


@pack_stored.register
def _pack_int8(weight: Int8Weight) -> PackedWeight | None:
    num_in = weight.shape[1]
    is_taken = num_in % 4 == 0 and num_in <= MAX_INT8_INPUTS
    return PackedWeight.from_int8(weight.numbers, weight.scales) if is_taken else None


@pack_stored.register
def _pack_stacked(weight: StackedWeight) -> PackedWeight | None:
    parts = [pack_stored(part) for part in weight.parts]
    packed = [part for part in parts if part is not None]
    return PackedWeight.stack(packed) if len(packed) == len(parts) else None


@pack_stored.register
def _pack_dense(weight: DenseValues) -> PackedWeight | None:
    return PackedWeight.pack(weight.values.clone()) if can_pack(weight.values) else None


@pack_stored.register
def _pack_minimums(weight: MinimumWeight) -> PackedWeight | None:
    return PackedWeight.from_minimums(weight) if _has_factors(weight) else None


@pack_stored.register
def _pack_grouped(weight: GroupedWeight) -> PackedWeight | None:
    if not weight.has_equal_groups:
        return _pack_unequal(weight)
    num_in = weight.shape[1]
    order = None if weight.groups is None else order_of(weight.groups)
    if _is_int4(weight):
        return _pack_int4(weight, order)
    is_taken = _has_blocks(num_in // len(weight.scales), num_in)
    return _pack_uint8(weight, order) if is_taken else None


@pack_stored.register
def _pack_mxfp4(weight: Mxfp4Weight) -> PackedWeight | None:
    """Pack an MXFP4 weight; None if exponents of an output are too far apart."""
    halves = weight.powers().T / 2
    if weight.shape[0] % 8 or not _are_halves(halves):
        return None
    return _pack_fp4(weight.shape, weight.blocks.flatten(1), halves)


def _pack_fp4(shape: torch.Size, packed: Tensor, halves: Tensor) -> PackedWeight:
    """Pack values of four bits, whose scales are twice `halves` [groups, out_features]."""
    words = packed.view(torch.int32).T.contiguous()
    zeros = torch.full(halves.shape, NO_ZERO, dtype=torch.uint8)  # this format has no zero points
    groups = make_groups(shape, words, halves, zeros, None)
    return PackedWeight.from_groups(words, groups, False, WeightFormat.MXFP4)


@pack_stored.register
def _pack_nvfp4(weight: Nvfp4Weight) -> PackedWeight | None:
    num_out, num_in = weight.shape
    if num_out % 8 or num_in // weight.scales.shape[1] % SMALLEST_BLOCK:
        return None
    halves = weight.scales.float().T / 2
    packed = _pack_fp4(weight.shape, weight.packed.contiguous(), halves)
    packed.scale_outputs(weight.factors)
    return packed


@pack_stored.register
def _pack_table(weight: TableWeight) -> PackedWeight | None:
    """Pack a weight of table indices; as int8 if a group is not a multiple of 8 inputs."""
    num_in = weight.shape[1]
    block = num_in // weight.scales.shape[1]
    if block % WeightFormat.TABLE4.inputs_per_word or not _has_blocks(block, num_in):
        grouped = weight.as_grouped()
        return None if grouped is None else pack_stored(grouped)
    groups = ByteGroups(scales=weight.scales.T, block_inputs=block, table=weight.table)
    return PackedWeight.from_bytes(WeightFormat.TABLE4, weight.codes, groups)


def _pack_unequal(weight: GroupedWeight) -> PackedWeight | None:
    """Pack a weight whose groups do not consist of neighbouring inputs."""
    found = weight.with_neighbours(_UNEQUAL_BLOCK)
    if found is None:
        return None
    equal, order = found
    packed = pack_stored(equal)
    if packed is not None and order is not None:
        packed.read_inputs(order.int(), weight.shape[1])
    return packed


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
