"""Decodes the block types of GGUF files: from bytes to quantized values, scales and minimums.

The common types are decoded here, so our kernels can use their parts. All others are dequantized by
the package gguf, which is needed only for them. A row is a sequence of blocks. Layouts and formulas
follow the published format; sums and products are float32 in the order of the format, so values are
bit-identical to the values of other readers.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.errors import ConfigError
from vllm.ops.stored_weight import GroupScales

DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types without blocks."""


@dataclass(frozen=True)
class Blocks:
    """Rows of quantized integers, with a scale for each group of neighbours."""

    codes: Tensor
    """[rows, N] uint8."""
    scales: GroupScales
    """Scales of the N / group groups."""
    zero: int = 0
    """A value is (code - zero) * scale - minimum."""
    minimums: GroupScales | None = None
    """Minimums, as many as scales; None: all are 0."""

    def dequantize(self) -> Tensor:
        """Dequantize to [rows, N] float32."""
        scales = self.scales.values()
        numbers = self.codes.unflatten(1, (scales.shape[1], -1)).float()
        if self.zero:
            numbers -= self.zero
        numbers *= scales[..., None]
        if self.minimums is not None:
            numbers -= self.minimums.values()[..., None]
        return numbers.flatten(1)

    def taken_off(self) -> GroupScales:
        """Return the offset that is subtracted from codes * scales: minimums, or zero * scales."""
        if self.minimums is not None:
            return self.minimums
        return GroupScales(
            factors=self.scales.factors, multipliers=self.scales.multipliers * self.zero
        )


@dataclass(frozen=True)
class BlockType:
    """Storage format for a GGUF type with which the kernels multiply directly."""

    bits: int
    """Bits that a quantized value takes in memory."""
    group: int
    """Neighbours that share a scale."""
    factor_group: int = 0
    """Neighbours that share the factors of scales and minimums; 0: has no part in a weight with
    minimums, as numbers have more than 5 bits."""
    has_minimums: bool = False


STORED = {
    "Q4_0": BlockType(4, 32, 32),
    "Q5_0": BlockType(5, 32, 32),
    "Q8_0": BlockType(8, 32),
    "Q6_K": BlockType(6, 16),
    "Q2_K": BlockType(4, 16, 256, has_minimums=True),
    "Q3_K": BlockType(4, 16, 256, has_minimums=True),
    "Q4_1": BlockType(4, 32, 32, has_minimums=True),
    "Q5_1": BlockType(5, 32, 32, has_minimums=True),
    "Q4_K": BlockType(4, 32, 256, has_minimums=True),
    "Q5_K": BlockType(5, 32, 256, has_minimums=True),
}
"""Types that are kept in memory in their own format."""


def read_blocks(type_name: str, data: Tensor) -> Blocks:
    """Decode rows of blocks, [rows, bytes] uint8, to quantized values with scales."""
    function, block_bytes = _READERS[type_name]
    return function(data.unflatten(1, (-1, block_bytes)))


def _halves(data: Tensor) -> Tensor:
    """Convert pairs of bytes [..., 2 n] from float16 to [..., n] float32."""
    return data.contiguous().view(torch.float16).float()


def _single(factors: Tensor, multiplier: int = 1) -> GroupScales:
    """Return scales that consist of one factor per group, [rows, N]."""
    return GroupScales(
        factors=factors, multipliers=torch.full(factors.shape, multiplier, dtype=torch.int8)
    )


def _nibbles(data: Tensor) -> Tensor:
    """Unpack [..., n] -> [..., 2 n]: the low halves of all bytes, then the high ones."""
    return torch.cat((data & 15, data >> 4), dim=-1)


def _bits(data: Tensor) -> Tensor:
    """Unpack four bytes of each block [rows, B, 4] to single bits, [rows, B, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (data[..., None] >> shifts & 1).flatten(-2)


def _q8_0(blocks: Tensor) -> Blocks:
    codes = blocks[..., 2:] ^ 128  # int8 codes + 128, as uint8
    return Blocks(codes.flatten(1), _single(_halves(blocks[..., :2]).flatten(1)), zero=128)


def _q4_0(blocks: Tensor) -> Blocks:
    codes = _nibbles(blocks[..., 2:])
    return Blocks(codes.flatten(1), _single(_halves(blocks[..., :2]).flatten(1)), zero=8)


def _q4_1(blocks: Tensor) -> Blocks:
    scales, least = _halves(blocks[..., :4]).unbind(-1)
    return Blocks(
        _nibbles(blocks[..., 4:]).flatten(1), _single(scales), minimums=_single(least, -1)
    )


def _q5_0(blocks: Tensor) -> Blocks:
    codes = _nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return Blocks(codes.flatten(1), _single(_halves(blocks[..., :2]).flatten(1)), zero=16)


def _q5_1(blocks: Tensor) -> Blocks:
    scales, least = _halves(blocks[..., :4]).unbind(-1)
    codes = _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return Blocks(codes.flatten(1), _single(scales), minimums=_single(least, -1))


def _scales_of_k(blocks: Tensor) -> tuple[GroupScales, GroupScales]:
    """Decode the scales and minimums of the eight groups of Q4_K and Q5_K: 6 bits each, in 12
    bytes.
    """
    factors = _halves(blocks[..., :4])
    first, second, third = blocks[..., 4:16].split(4, dim=-1)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)
    minimums = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    found = [
        GroupScales(factors=factors[..., i], multipliers=multipliers.flatten(1).view(torch.int8))
        for i, multipliers in enumerate((scales, minimums))
    ]
    return found[0], found[1]


def _pairs(data: Tensor) -> Tensor:
    """Unpack four 2-bit values from each byte, in the order of Q2_K and Q3_K.

    [rows, B, 64] -> [rows, B, 256]
    """
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return (data.unflatten(-1, (2, 1, 32)) >> shifts & 3).flatten(-3)


def _q2_k(blocks: Tensor) -> Blocks:
    factors, both = _halves(blocks[..., 80:84]), blocks[..., :16]
    scales, minimums = (
        GroupScales(factors=factors[..., i], multipliers=each.flatten(1).view(torch.int8))
        for i, each in enumerate((both & 15, both >> 4))
    )
    return Blocks(_pairs(blocks[..., 16:80]).flatten(1), scales, minimums=minimums)


def _q3_k(blocks: Tensor) -> Blocks:
    high = _bits_of_k(blocks[..., :32]).flatten(-2)
    low, upper = _nibbles(blocks[..., 96:104]), blocks[..., 104:108]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    multipliers = low | (upper[..., None, :] >> shifts & 3).flatten(-2) << 4
    scales = GroupScales(
        factors=_halves(blocks[..., 108:]).flatten(1),
        multipliers=multipliers.flatten(1).view(torch.int8) - 32,
    )
    return Blocks((_pairs(blocks[..., 32:96]) | high << 2).flatten(1), scales, zero=4)


def _bits_of_k(data: Tensor) -> Tensor:
    """Unpack 32 bytes of each block to bits: the lowest bits of all bytes, then the next ones, ...

    [rows, B, 32] -> [rows, B, 8, 32]
    """
    return data[..., None, :] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1


def _q4_k(blocks: Tensor) -> Blocks:
    scales, minimums = _scales_of_k(blocks)
    codes = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32)))
    return Blocks(codes.flatten(1), scales, minimums=minimums)


def _q5_k(blocks: Tensor) -> Blocks:
    scales, minimums = _scales_of_k(blocks)
    high = _bits_of_k(blocks[..., 16:48])
    codes = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    return Blocks((codes | high << 4).flatten(1), scales, minimums=minimums)


def _q6_k(blocks: Tensor) -> Blocks:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))  # two halves of 128 values each
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3
    scales = GroupScales(
        factors=_halves(blocks[..., 208:]).flatten(1),
        multipliers=blocks[..., 192:208].contiguous().view(torch.int8).flatten(1),
    )
    return Blocks((low | high.flatten(-2) << 4).flatten(1), scales, zero=32)


_READERS: dict[str, tuple[Callable[[Tensor], Blocks], int]] = {
    "Q4_0": (_q4_0, 18),
    "Q4_1": (_q4_1, 20),
    "Q5_0": (_q5_0, 22),
    "Q5_1": (_q5_1, 24),
    "Q8_0": (_q8_0, 34),
    "Q2_K": (_q2_k, 84),
    "Q3_K": (_q3_k, 110),
    "Q4_K": (_q4_k, 144),
    "Q5_K": (_q5_k, 176),
    "Q6_K": (_q6_k, 210),
}
"""Type -> the function that reads its blocks [rows, B, bytes], and the bytes of a block."""


def needs_package(type_name: str) -> bool:
    """Return whether the package gguf (the extra `vllm[gguf]`) is needed to dequantize a type."""
    return type_name not in DENSE and type_name not in _READERS


def check_package(type_names: Iterable[str]) -> None:
    """Check that the package gguf is installed if one of these types needs it.

    Raises:
        ConfigError: it is not installed, or too old.
    """
    for name in sorted(set(filter(needs_package, type_names))):
        try:
            from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

            _, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
            dequantize_by_package(name, torch.zeros(1, block_bytes, dtype=torch.uint8))
        except (ImportError, KeyError, NotImplementedError) as error:
            raise ConfigError(
                f"the GGUF model has tensors of the type {name}, which the package gguf "
                f"dequantizes; it is not installed or too old ({error}). Install it with: pip "
                f"install 'vllm[gguf]'; or use a file with the types {', '.join(_READERS)}"
            ) from None


def dequantize_by_package(type_name: str, data: Tensor) -> Tensor:
    """Dequantize rows of blocks, [rows, bytes] uint8, with the package gguf: [rows, N] float32."""
    from gguf import GGMLQuantizationType, quants

    return torch.from_numpy(quants.dequantize(data.numpy(), GGMLQuantizationType[type_name]))
