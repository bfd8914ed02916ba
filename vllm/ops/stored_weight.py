"""Weights of linear layers as quantized checkpoints store them, and their meaning.

`dequantize` is the formula of the format, in float32: every device multiplies with these values, or
documents how it rounds them. Knows no files, no layers and no devices.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import TypeVar

import torch
from torch import Tensor


class StoredWeight(ABC):
    """A weight [out_features, in_features] of low-bit values and their scales, on the host."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """The shape of the dequantized weight: (out_features, in_features)."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """Name of the format, for the log."""

    @abstractmethod
    def dequantize(self) -> Tensor:
        """Dequantize to [out_features, in_features] float32."""

    def joined(self, other: "StoredWeight") -> "StoredWeight | None":
        """Concatenate the outputs of two weights with the same inputs; None if that is not
        possible.

        Their formats differ, or this kind cannot be concatenated.
        """
        return None

    def as_grouped(self) -> "GroupedWeight | None":
        """Convert to integers in groups, with the same values; None if this kind cannot be."""
        return None

    def with_neighbours(self, unit: int | None) -> "tuple[StoredWeight, Tensor | None] | None":
        """Return the same weight with the inputs of each group adjacent; None if that is not
        possible.

        Args:
            unit: groups of unequal size are divided into several with this number of columns, a
                multiple of 32; None: they are not supported.

        Returns:
            (the weight, the input of each of its columns [columns] int64; None: order unchanged)
        """
        return self, None


Weight = TypeVar("Weight", bound=StoredWeight)


def all_of(kind: type[Weight], weights: Sequence[StoredWeight]) -> list[Weight] | None:
    """Return the weights if all of them are of this kind, else None."""
    found = [weight for weight in weights if isinstance(weight, kind)]
    return found if len(found) == len(weights) else None


@dataclass(frozen=True, kw_only=True)
class Fp8Weight(StoredWeight):
    """float8_e4m3fn values times a scale for each block of inputs of an output."""

    numbers: Tensor
    """[out_features, in_features] float8_e4m3fn, none of them NaN."""
    scales: Tensor
    """[out_features, blocks] float32."""
    block_inputs: int
    """Inputs that share a scale; the last block may have fewer."""
    input_scale: float | None = None
    """Divisor of inputs that are rounded to FP8; None: chosen for each token."""
    largest: float = 448.0
    """The range of the numbers, and of inputs that are rounded."""
    rounds_inputs: bool = False
    """Every device rounds inputs with `input_scale`; else one may keep them as they are."""

    @property
    def kind(self) -> str:
        return "fp8"

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def dequantize(self) -> Tensor:
        num_in = self.numbers.shape[1]
        scales = self.scales.repeat_interleave(self.block_inputs, dim=1)[:, :num_in]
        return self.numbers.float() * scales


@dataclass(frozen=True, kw_only=True)
class Int8Weight(StoredWeight):
    """int8 values times a scale per output, for inputs that are quantized to int8 as well."""

    numbers: Tensor
    """[out_features, in_features] int8."""
    scales: Tensor
    """[out_features] float32."""

    @property
    def kind(self) -> str:
        return "int8"

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def dequantize(self) -> Tensor:
        return self.numbers.float() * self.scales[:, None]

    def as_grouped(self) -> "GroupedWeight | None":
        return (
            None if self.shape[1] % 4 else GroupedWeight.from_int8(self.numbers, self.scales[None])
        )


_BYTE_MIDDLE = 128
"""int8 plus this are bytes without a sign."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Index of the output at each position of a word of AWQ, from the lowest bits on."""


@dataclass(frozen=True, kw_only=True)
class GroupedWeight(StoredWeight):
    """Integers minus a zero point, times a scale; each group of inputs has both."""

    words: Tensor
    """int32. [in_features * bits / 32, out_features]: the numbers of an output follow each other
    from the lowest bits on. AWQ: [in_features, out_features / 8], eight outputs of an input."""
    is_awq: bool = False
    bits: int
    """2, 3, 4 or 8; AWQ: 4."""
    scales: Tensor
    """[G, out_features] float32."""
    zeros: Tensor
    """[G, out_features] int16, from 0 to 2^bits."""
    groups: Tensor | None = None
    """[in_features] int32: the group of each input, each of the G groups at least once; None:
    in_features / G neighbours each."""

    @classmethod
    def from_int8(
        cls, numbers: Tensor, scales: Tensor, groups: Tensor | None = None
    ) -> "GroupedWeight":
        """Make a weight from int8 values [out_features, in_features] and scales [G, out_features].

        The values must fill whole words; for `groups` see the class.
        """
        codes = numbers.contiguous().view(torch.uint8) ^ _BYTE_MIDDLE
        return cls(
            words=codes.view(torch.int32).T.contiguous(),
            bits=8,
            scales=scales,
            zeros=torch.full(scales.shape, _BYTE_MIDDLE, dtype=torch.int16),
            groups=groups,
        )

    @property
    def kind(self) -> str:
        return f"numbers of {self.bits} bits in groups"

    @property
    def shape(self) -> torch.Size:
        first, second = self.words.shape
        if self.is_awq:
            return torch.Size((second * 8, first))
        return torch.Size((second, first * 32 // self.bits))

    def numbers(self) -> Tensor:
        """Unpack the quantized values [out_features, in_features] uint8, not dense."""
        if self.is_awq:
            return unpack_awq(self.words).T
        return unpack_bits(self.words.T.contiguous(), self.bits)

    def dequantize(self) -> Tensor:
        num_in = self.shape[1]
        groups = self.groups
        if groups is None:
            groups = torch.arange(num_in) // (num_in // len(self.scales))
        zeros, scales = (x.T[:, groups.long()] for x in (self.zeros, self.scales))
        return (self.numbers().to(torch.int16) - zeros).float() * scales

    def joined(self, other: StoredWeight) -> "GroupedWeight | None":
        if not isinstance(other, GroupedWeight) or self.scales.shape != other.scales.shape:
            return None
        groups = (self.groups, other.groups)
        is_same = groups == (None, None) or (
            groups[0] is not None and groups[1] is not None and torch.equal(groups[0], groups[1])
        )
        if not is_same or (self.bits, self.is_awq) != (other.bits, other.is_awq):
            return None
        words, scales, zeros = (
            torch.cat((getattr(self, name), getattr(other, name)), dim=1)
            for name in ("words", "scales", "zeros")
        )
        return replace(self, words=words, scales=scales, zeros=zeros)

    def as_grouped(self) -> "GroupedWeight":
        return self

    @property
    def has_equal_groups(self) -> bool:
        """Whether all groups have the same number of inputs."""
        sizes = None if self.groups is None else self.groups.bincount()
        return sizes is None or bool((sizes == sizes[0]).all())

    def with_neighbours(self, unit: int | None) -> "tuple[GroupedWeight, Tensor | None] | None":
        """Return the weight with neighbouring groups, and the order of inputs; see `StoredWeight`.

        Columns are sorted by group. If groups differ in size, a group that is not a multiple of
        `unit` begins with columns of 0, which belong to one of its inputs. None if a zero point is
        2^bits, since no integer means 0 then.
        """
        if self.groups is None:
            return self, None
        inputs = self.groups.long().argsort(stable=True)
        counts = self.groups.bincount(minlength=len(self.scales))
        if self.has_equal_groups:
            unit = int(counts[0])
        if unit is None:
            return None
        units = -(-counts // unit)
        added = units * unit - counts
        if bool(added.any()) and bool((self.zeros >> self.bits).any()):
            return None
        ends = counts.cumsum(0)
        lengths = zip(counts.tolist(), added.tolist(), ends.tolist(), strict=True)
        order = torch.cat(
            [
                torch.cat((inputs[end - 1].expand(more), inputs[end - count : end]))
                for count, more, end in lengths
            ]
        )
        group = torch.arange(len(counts)).repeat_interleave(units)
        column_group = group.repeat_interleave(unit)
        starts = (units.cumsum(0) - units) * unit
        is_added = torch.arange(len(order)) - starts[column_group] < added[column_group]
        zeros = self.zeros[column_group].T.to(torch.uint8)
        numbers = torch.where(is_added, zeros, self.numbers()[:, order])
        equal = GroupedWeight(
            words=pack_bits(numbers.contiguous(), self.bits).T.contiguous(),
            bits=self.bits,
            scales=self.scales[group],
            zeros=self.zeros[group],
        )
        return equal, order


def round_to_fp8(weight: Tensor) -> Fp8Weight:
    """Quantize a dense weight [out_features, in_features] to FP8, with a scale per output feature.

    The largest value of an output becomes 448, the largest float8_e4m3fn value. NaN and infinity
    make the scale NaN, so that they reach the results.
    """
    scales, numbers = _divided(weight.abs().amax(dim=1, keepdim=True), 448, weight)
    return Fp8Weight(
        numbers=numbers.to(torch.float8_e4m3fn), scales=scales, block_inputs=weight.shape[1]
    )


def round_to_int8(weight: Tensor) -> Int8Weight:
    """Quantize a dense weight to int8, with a scale per output feature.

    NaN and infinity make the scale NaN, so that they reach the results.
    """
    scales, numbers = _divided(weight.abs().amax(dim=1, keepdim=True), 127, weight)
    return Int8Weight(numbers=numbers.round().to(torch.int8), scales=scales[:, 0])


def round_in_groups(groups: Tensor) -> GroupedWeight:
    """Quantize dense weights [out_features, G, inputs of a group] to int8 in groups.

    The inputs of a group must be a multiple of four.
    """
    rows = groups.flatten(0, 1)
    scales, numbers = _divided(rows.abs().amax(dim=1, keepdim=True), 127, rows)
    whole = numbers.round().to(torch.int8).view(len(groups), -1)
    return GroupedWeight.from_int8(whole, scales.view(len(groups), -1).T.contiguous())


def _divided(largest: Tensor, becomes: int, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales that map `largest` to `becomes`, and the weight divided by them."""
    largest = largest.float()
    scales = torch.where(largest == 0, 1.0, largest / becomes)
    scales = scales.where(scales.isfinite(), float("nan"))
    numbers = (weight / scales.nan_to_num(1.0)).nan_to_num(0.0)
    return scales, numbers.clamp(-becomes, becomes)


_INT4_GROUP = 32
"""Inputs that share a scale."""
_INT4_MIDDLE = 8
"""The code of the number 0."""


def round_to_int4(weight: Tensor) -> GroupedWeight | Int8Weight:
    """Quantize a dense weight to values from -8 to 7 with a scale for each 32 inputs.

    The largest value of a group becomes -8. The result is int8 if the inputs are not a multiple of
    32.
    """
    if weight.shape[1] % _INT4_GROUP:
        return round_to_int8(weight)
    groups = weight.float().unflatten(1, (-1, _INT4_GROUP))
    indices = groups.abs().argmax(dim=-1, keepdim=True)
    largest = -groups.gather(-1, indices)
    scales = torch.where(largest == 0, 1.0, largest / _INT4_MIDDLE)
    scales = scales.where(scales.isfinite(), float("nan"))
    numbers = (groups / scales.nan_to_num(1.0)).nan_to_num(0.0).round()
    codes = numbers.clamp(-_INT4_MIDDLE, _INT4_MIDDLE - 1) + _INT4_MIDDLE
    return GroupedWeight(
        words=pack_nibbles(codes.to(torch.uint8).flatten(1)).T.contiguous(),
        bits=4,
        scales=scales[..., 0].T.contiguous(),
        zeros=torch.full((groups.shape[1], len(weight)), _INT4_MIDDLE, dtype=torch.int16),
    )


@dataclass(frozen=True, kw_only=True)
class GroupScales:
    """A value for each group of neighbours, stored as a shared factor times a small integer."""

    factors: Tensor
    """[rows, N] float32, each a number of float16."""
    multipliers: Tensor
    """[rows, G] int8; G / N neighbouring groups have the same factor."""

    def values(self) -> Tensor:
        """Compute the values [rows, G] float32."""
        num_groups = self.multipliers.shape[1]
        factors = self.factors.repeat_interleave(num_groups // self.factors.shape[1], dim=1)
        return factors * self.multipliers.float()

    def joined(self, other: "GroupScales") -> "GroupScales | None":
        """Concatenate the rows of both; None if their groups differ."""
        factors, multipliers = (self.factors, other.factors), (self.multipliers, other.multipliers)
        if any(first.shape[1:] != second.shape[1:] for first, second in (factors, multipliers)):
            return None
        return GroupScales(factors=torch.cat(factors), multipliers=torch.cat(multipliers))


@dataclass(frozen=True, kw_only=True)
class MinimumWeight(StoredWeight):
    """Integers times a scale, minus a minimum; each group of inputs has both."""

    codes: Tensor
    """[out_features, in_features] uint8, below 2^bits."""
    bits: int
    """4 or 5."""
    scales: GroupScales
    minimums: GroupScales
    """Minimums, with as many groups and factors."""

    @property
    def kind(self) -> str:
        return f"numbers of {self.bits} bits with minimums"

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def dequantize(self) -> Tensor:
        scales, minimums = self.scales.values(), self.minimums.values()
        numbers = self.codes.unflatten(1, (scales.shape[1], -1)).float()
        return (numbers * scales[..., None] - minimums[..., None]).flatten(1)

    def joined(self, other: StoredWeight) -> "MinimumWeight | None":
        if not isinstance(other, MinimumWeight):
            return None
        scales, minimums = self.scales.joined(other.scales), self.minimums.joined(other.minimums)
        if scales is None or minimums is None:
            return None
        return MinimumWeight(
            codes=torch.cat((self.codes, other.codes)),
            bits=max(self.bits, other.bits),
            scales=scales,
            minimums=minimums,
        )

    @classmethod
    def of_groups(
        cls, codes: Tensor, bits: int, scales: Tensor, minimums: Tensor
    ) -> "MinimumWeight":
        """Make a weight with a scale and a minimum for each group of inputs.

        Args:
            codes: [out_features, in_features] uint8, below 2^bits.
            bits: 5 or less.
            scales: [out_features, G], rounded to float16.
            minimums: [out_features, G], rounded to float16.
        """
        num_in, num_groups = codes.shape[1], scales.shape[1]
        size = num_in // num_groups
        per_factor = size // _MINIMUM_BLOCK if size % _MINIMUM_BLOCK == 0 else 1
        ones = torch.ones(len(codes), num_groups * per_factor, dtype=torch.int8)
        both = (
            GroupScales(factors=each.half().float(), multipliers=ones)
            for each in (scales, minimums)
        )
        return cls(codes=codes, bits=max(bits, 4), scales=next(both), minimums=next(both))


_MINIMUM_BLOCK = 32
"""Inputs of a group, where larger groups are divided."""


@dataclass(frozen=True, kw_only=True)
class DenseValues(StoredWeight):
    """A weight of another format that is dequantized on every device."""

    values: Tensor
    """[out_features, in_features] of the dtype of the model."""

    @property
    def kind(self) -> str:
        return str(self.values.dtype).removeprefix("torch.")

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantize(self) -> Tensor:
        return self.values.float()


@dataclass(frozen=True, kw_only=True)
class StackedWeight(StoredWeight):
    """Several weights with the same inputs, whose outputs are concatenated."""

    parts: tuple[StoredWeight, ...]

    @property
    def kind(self) -> str:
        return " and ".join(dict.fromkeys(part.kind for part in self.parts))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))

    def dequantize(self) -> Tensor:
        return torch.cat([part.dequantize() for part in self.parts])


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the format, by the last three bits of an element; the first bit is the sign."""
E8M0_BIAS = 127
"""Subtracted from the byte of a scale in E8M0, to get the power of two."""


@dataclass(frozen=True, kw_only=True)
class Mxfp4Weight(StoredWeight):
    """4-bit elements (E2M1) times a power of two (E8M0) for each 32 inputs.

    If ranks split a group, it has several parts with the same scale. OCP Microscaling Formats (MX)
    Specification 1.0, 2023: an element has a sign, two bits of exponent and one of mantissa.
    """

    blocks: Tensor
    """[..., B, 16 or less] uint8: two elements each, the first in the lower four bits; a weight has
    one dimension more before them, [out_features, B, 16]."""
    scales: Tensor
    """[..., B] uint8: exponents, 127 is 1."""

    @property
    def kind(self) -> str:
        return "MXFP4"

    @property
    def shape(self) -> torch.Size:
        *outputs, num_blocks, num_bytes = self.blocks.shape
        return torch.Size((*outputs, num_blocks * num_bytes * 2))

    def powers(self) -> Tensor:
        """Return the factor of each group, a power of two, [..., B] float32."""
        exponents = self.scales.to(torch.int32) - E8M0_BIAS
        return torch.ldexp(torch.ones(exponents.shape), exponents)

    def codes(self) -> Tensor:
        """Unpack the four bits of each element, [..., in_features] uint8."""
        return nibbles_of(self.blocks).flatten(-2)

    def dequantize(self) -> Tensor:
        elements = e2m1_numbers(self.codes()).unflatten(-1, (self.scales.shape[-1], -1))
        exponents = self.scales.to(torch.int32) - E8M0_BIAS
        return torch.ldexp(elements, exponents.unsqueeze(-1)).flatten(-2)

    def joined(self, other: StoredWeight) -> "Mxfp4Weight | None":
        if not isinstance(other, Mxfp4Weight):
            return None
        blocks = torch.cat((self.blocks, other.blocks))
        return Mxfp4Weight(blocks=blocks, scales=torch.cat((self.scales, other.scales)))


@dataclass(frozen=True, kw_only=True)
class Nvfp4Weight(StoredWeight):
    """4-bit elements (E2M1) times a scale for each group of inputs.

    The scale is an e4m3 value times a factor of the output.
    """

    packed: Tensor
    """[out_features, in_features / 2] uint8: two elements each, the first in the lower four
    bits."""
    scales: Tensor
    """[out_features, G] float8_e4m3fn, for in_features / G neighbours each; not negative."""
    factors: Tensor
    """[out_features] float32."""

    @property
    def kind(self) -> str:
        return "NVFP4"

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.packed), 2 * self.packed.shape[1]))

    def dequantize(self) -> Tensor:
        scales = self.scales.float() * self.factors[:, None]
        elements = e2m1_numbers(nibbles_of(self.packed)).unflatten(1, (scales.shape[1], -1))
        return (elements * scales[..., None]).flatten(1)

    def joined(self, other: StoredWeight) -> "Nvfp4Weight | None":
        if not isinstance(other, Nvfp4Weight) or self.scales.shape[1:] != other.scales.shape[1:]:
            return None
        scales = torch.cat([each.scales.view(torch.uint8) for each in (self, other)])
        return Nvfp4Weight(
            packed=torch.cat((self.packed, other.packed)),
            scales=scales.view(torch.float8_e4m3fn),
            factors=torch.cat((self.factors, other.factors)),
        )


@dataclass(frozen=True, kw_only=True)
class TableWeight(StoredWeight):
    """4-bit elements, each an index of a table of values, times a scale for each group of
    inputs.
    """

    codes: Tensor
    """[out_features, in_features] uint8, below 16."""
    table: Tensor
    """[16] float32."""
    scales: Tensor
    """[out_features, G] float32, for in_features / G neighbours each."""

    @property
    def kind(self) -> str:
        return "4 bits with a table"

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def dequantize(self) -> Tensor:
        elements = self.table[self.codes.int()].unflatten(1, (self.scales.shape[1], -1))
        return (elements * self.scales[..., None]).flatten(1)

    def joined(self, other: StoredWeight) -> "TableWeight | None":
        if not isinstance(other, TableWeight) or not torch.equal(self.table, other.table):
            return None
        if self.scales.shape[1:] != other.scales.shape[1:]:
            return None
        return TableWeight(
            codes=torch.cat((self.codes, other.codes)),
            table=self.table,
            scales=torch.cat((self.scales, other.scales)),
        )

    def as_grouped(self) -> GroupedWeight | None:
        """Convert to int8, with a step that approximates the values of the table by multiples.

        For NF4 and FP4 the error is at most 0.4 % of the table's largest value. None if the inputs
        are not a multiple of 4.
        """
        if self.shape[1] % 4:
            return None
        whole, step = _whole_multiples(self.table)
        return GroupedWeight.from_int8(whole[self.codes.int()], (self.scales * step).T.contiguous())


NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""NormalFloat of 4 bits (arXiv 2305.14314, appendix E)."""
_NF4_GROUP = 64
"""Inputs that share a scale, where so many divide the inputs of a weight."""


def round_to_nf4(weight: Tensor) -> TableWeight | Int8Weight:
    """Quantize a dense weight to NF4, with a scale for each 64 inputs.

    Groups have fewer inputs if 64 does not divide all inputs; if fewer than 16, the result is int8.
    The largest value of a group becomes 1 or -1.
    """
    size = gcd(_NF4_GROUP, weight.shape[1])
    if size < 16:
        return round_to_int8(weight)
    groups, table = weight.unflatten(1, (-1, size)), torch.tensor(NF4)
    scales, elements = _divided(groups.abs().amax(dim=-1, keepdim=True), 1, groups)
    codes = torch.bucketize(elements, (table[1:] + table[:-1]) / 2)
    return TableWeight(
        codes=codes.to(torch.uint8).flatten(1), table=table, scales=scales[..., 0].contiguous()
    )


def _whole_multiples(table: Tensor) -> tuple[Tensor, float]:
    """Approximate a table [N] of values by int8 values times a step.

    Return the values and the step with the smallest sum of squared errors that was found.
    """
    most = 127
    largest = float(table.abs().max()) or 1.0
    factors = torch.arange(most * 32, most * 64 + 1) / 64 / largest
    whole = (table * factors[:, None]).round()
    steps = (whole * table).sum(1) / whole.square().sum(1).clamp(min=1)
    best = (whole * steps[:, None] - table).square().sum(1).argmin()
    return whole[best].to(torch.int8), float(steps[best])


def nibbles_of(packed: Tensor) -> Tensor:
    """Split the two 4-bit elements in each byte, the lower one first.

    [..., N] uint8 -> [..., 2 * N] uint8.
    """
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def e2m1_numbers(codes: Tensor) -> Tensor:
    """Convert 4-bit codes of E2M1 elements to float32."""
    return torch.tensor([*E2M1, *(-x for x in E2M1)])[codes.int()]


def unpack_bits(words: Tensor, bits: int) -> Tensor:
    """Unpack rows of int32 words to values of 2 to 6 or 8 bits, [R, W] -> [R, W * 32 / bits] uint8.

    Values are stored from the lowest bits on, and may cross the end of a word.
    """
    if 32 % bits:  # 32 values of n bits fill n whole words
        several = words.unflatten(1, (-1, bits)).long() & 0xFFFFFFFF
        starts = torch.arange(32) * bits
        first, shifts = starts // 32, starts % 32
        low = several[..., first] >> shifts
        high = several[..., (first + 1).clamp(max=bits - 1)] << (32 - shifts)
        return ((low | high) & (1 << bits) - 1).to(torch.uint8).flatten(1)
    numbers = words.contiguous().view(torch.uint8)  # the lowest byte of a word comes first
    if bits == 8:
        return numbers
    parts = [numbers >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(1)


def pack_bits(numbers: Tensor, bits: int) -> Tensor:
    """Pack values, the reverse of `unpack_bits`: [R, N] uint8 -> [R, N * bits / 32] int32."""
    if bits == 3:
        stream = (numbers[..., None] >> torch.arange(bits, dtype=torch.uint8) & 1).flatten(1)
        eights = stream.unflatten(1, (-1, 8)) << torch.arange(8, dtype=torch.uint8)
        whole = eights.sum(-1, dtype=torch.uint8)
    else:
        per_byte = numbers.unflatten(1, (-1, 8 // bits))
        shifted = per_byte << torch.arange(0, 8, bits, dtype=torch.uint8)
        whole = shifted.sum(-1, dtype=torch.uint8)
    return whole.contiguous().view(torch.int32)


def unpack_awq(words: Tensor) -> Tensor:
    """Unpack eight outputs in each word [R, W] int32 of AWQ -> [R, 8 * W] uint8 in their order."""
    eights = unpack_bits(words, 4).unflatten(1, (-1, 8))
    out = torch.empty_like(eights)
    out[..., list(AWQ_ORDER)] = eights
    return out.flatten(1)


def pack_nibbles(numbers: Tensor) -> Tensor:
    """Pack 4-bit values [R, N] uint8, N a multiple of 8 -> [R, N / 8] int32 words."""
    pairs = numbers.unflatten(1, (-1, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.int32)
