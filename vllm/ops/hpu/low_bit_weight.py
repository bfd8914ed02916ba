"""Low-bit weights in the memory of a Gaudi card, dequantized in each forward pass.

A card multiplies bf16 or FP8. `convert_from_uint4` reads 4-bit codes, and a cast of int8 reads
8-bit codes; torch operators then compute the weights. A row contains one input feature, so the
scales of a group of inputs are a row as well. Shapes depend only on the arguments.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from vllm.ops.stored_weight import (
    GroupedWeight,
    GroupScales,
    MinimumWeight,
    Mxfp4Weight,
    Nvfp4Weight,
    StoredWeight,
    nibbles_of,
    pack_nibbles,
)
from vllm.platforms.habana.kernels import FusedKernels

Part = Callable[[Tensor], Tensor]
"""Returns the requested rows of a tensor."""

_BYTE_MIDDLE = 128
"""Bytes less so much are int8, which the card converts."""
_WORD = 8
"""Number of 4-bit values in a word."""
_UINT4_MIDDLE = 8
"""Code of 0 in `_E2m1Rows`."""


def whole(kept: Tensor) -> Tensor:
    """Return the whole tensor: the default for `part`."""
    return kept


class LowBitWeight(nn.Module, ABC):
    """Low-bit weights with the same inputs, transposed and concatenated to [rows, N].

    A weight has one row for each of its inputs.
    """

    @abstractmethod
    def widened(self, dtype: torch.dtype, part: Part = whole) -> Tensor:
        """Dequantize to [rows, N] of `dtype`, or only the rows that `part` selects."""


def low_bit_weight(
    weights: Sequence[StoredWeight], kernels: FusedKernels, dtype: torch.dtype
) -> LowBitWeight | None:
    """Join weights of the same format; None if formats differ, or the card has no kernel for them.

    Args:
        weights: weights on the host; groups consist of neighbouring inputs.
        kernels: kernels of the card.
        dtype: data type of the inputs.
    """
    given = [weight.as_grouped() or weight for weight in weights]
    if len({(type(weight), weight.shape) for weight in given}) > 1:
        return None
    make = _KINDS.get(type(given[0]))
    return None if make is None else make(given, kernels, dtype)


def _is_even(weights: Sequence[StoredWeight]) -> bool:
    """Return whether the output features fill whole words of eight elements."""
    return all(weight.shape[0] % _WORD == 0 for weight in weights)


def _grouped_rows(
    weights: Sequence[GroupedWeight], kernels: FusedKernels, dtype: torch.dtype
) -> LowBitWeight | None:
    if len({weight.scales.shape for weight in weights}) > 1:
        return None
    has_nibbles = all(w.bits <= 4 and bool((w.zeros < 16).all()) for w in weights)
    if has_nibbles and _is_even(weights):
        return _Uint4Rows(weights, kernels, dtype)
    return _ByteRows(weights)


def _mxfp4_rows(
    weights: Sequence[Mxfp4Weight], kernels: FusedKernels, dtype: torch.dtype
) -> LowBitWeight | None:
    return _Mxfp4Rows(weights, kernels, dtype) if _is_even(weights) else None


def _nvfp4_rows(
    weights: Sequence[Nvfp4Weight], kernels: FusedKernels, dtype: torch.dtype
) -> LowBitWeight | None:
    return _Nvfp4Rows(weights, kernels, dtype) if _is_even(weights) else None


def _minimum_rows(
    weights: Sequence[MinimumWeight], kernels: FusedKernels, dtype: torch.dtype
) -> LowBitWeight:
    has_nibbles = _is_even(weights) and all(weight.bits == 4 for weight in weights)
    return _MinimumRows(weights, kernels if has_nibbles else None)


_KINDS: dict[type[StoredWeight], Callable[..., LowBitWeight | None]] = {
    GroupedWeight: _grouped_rows,
    Mxfp4Weight: _mxfp4_rows,
    Nvfp4Weight: _nvfp4_rows,
    MinimumWeight: _minimum_rows,
}
"""Makes rows of weights of a kind, called as `low_bit_weight`."""


class _Uint4Rows(LowBitWeight):
    """4-bit values minus a zero point, times a scale, computed by `convert_from_uint4`."""

    def __init__(
        self, weights: Sequence[GroupedWeight], kernels: FusedKernels, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._kernels = kernels
        scales = torch.cat([weight.scales for weight in weights]).to(dtype)
        zeros = torch.cat([weight.zeros for weight in weights]).to(torch.uint8)
        self.scales = _parameter(scales)
        self.zeros = _parameter(pack_nibbles(zeros))
        self.words = _parameter(_packed([weight.numbers() for weight in weights]))

    def widened(self, dtype: torch.dtype, part: Part = whole) -> Tensor:
        words, scales, zeros = (part(each) for each in (self.words, self.scales, self.zeros))
        return self._kernels.from_uint4(words, scales, zeros, dtype)


class _ByteRows(LowBitWeight):
    """8-bit values minus a zero point, times a scale, computed in float32."""

    def __init__(self, weights: Sequence[GroupedWeight]) -> None:
        super().__init__()
        scales = torch.cat([weight.scales for weight in weights])
        zeros = torch.cat([weight.zeros for weight in weights]) - _BYTE_MIDDLE
        self.scales = _parameter(scales[:, None])
        self.register_parameter("zeros", None)
        if bool(zeros.any()):
            self.zeros = _parameter(zeros.float()[:, None])
        rows = torch.cat([weight.numbers().T for weight in weights])
        numbers = (rows.contiguous() ^ _BYTE_MIDDLE).view(torch.int8)
        self.numbers = _parameter(numbers.unflatten(0, (len(scales), -1)))
        """[G, inputs of a group, N]"""

    def widened(self, dtype: torch.dtype, part: Part = whole) -> Tensor:
        numbers = part(self.numbers).float()
        if self.zeros is not None:
            numbers = numbers - part(self.zeros)
        return (numbers * part(self.scales)).flatten(0, 1).to(dtype)


class _WholeNumbers(nn.Module):
    """Rows of 4-bit values, as integers from -zero to 15 - zero, which are exact in every dtype.

    Args:
        numbers: [N, inputs] uint8 below 16 for each weight.
        zero: is subtracted.
        kernels: kernels of the card.
    """

    def __init__(self, numbers: Sequence[Tensor], zero: int, kernels: FusedKernels) -> None:
        super().__init__()
        self._kernels = kernels
        self.words = _parameter(_packed(numbers))
        num_columns = len(numbers[0])
        self.zeros = _parameter(pack_nibbles(torch.full((1, num_columns), zero).to(torch.uint8)))
        self.ones = _parameter(torch.ones(1, num_columns))

    def widened(self, dtype: torch.dtype, part: Part) -> Tensor:
        """Convert the integers to [rows, N] of `dtype`."""
        ones = self.ones.to(dtype)
        return self._kernels.from_uint4(part(self.words), ones, self.zeros, dtype)


class _E2m1Rows(nn.Module):
    """Rows of elements in E2M1.

    The values are 0, 1/2, 1, 3/2, 2, 3, 4, 6 and their negatives; the memory holds their index n,
    -7 to 7. The step between values doubles twice, so a value is 2 n - clamp(n, -4, 4) / 2 -
    clamp(n, -6, 6). This is exact in every dtype.

    Args:
        codes: [N, inputs] uint8 for each weight: the four bits of its elements.
        kernels: kernels of the card.
    """

    def __init__(self, codes: Sequence[Tensor], kernels: FusedKernels) -> None:
        super().__init__()
        indices = []
        for each in codes:
            size = each & 7
            indices.append(torch.where(each > 7, _UINT4_MIDDLE - size, _UINT4_MIDDLE + size))
        self.indices = _WholeNumbers(indices, _UINT4_MIDDLE, kernels)

    def widened(self, dtype: torch.dtype, part: Part) -> Tensor:
        """Convert the elements to [rows, N] of `dtype`."""
        indices = self.indices.widened(dtype, part)
        return 2 * indices - 0.5 * indices.clamp(-4, 4) - indices.clamp(-6, 6)


class _Mxfp4Rows(LowBitWeight):
    """E2M1 elements times a power of two, which is exact in every dtype."""

    def __init__(
        self, weights: Sequence[Mxfp4Weight], kernels: FusedKernels, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.elements = _E2m1Rows([weight.codes() for weight in weights], kernels)
        powers = torch.cat([weight.powers().T for weight in weights])
        self.scales = _parameter(powers[:, None].to(dtype))
        """[G, 1, N]"""

    def widened(self, dtype: torch.dtype, part: Part = whole) -> Tensor:
        scales = part(self.scales)
        elements = self.elements.widened(dtype, part).unflatten(0, (len(scales), -1))
        return (elements * scales).flatten(0, 1)


class _Nvfp4Rows(LowBitWeight):
    """E2M1 elements times a scale, computed in float32."""

    def __init__(
        self, weights: Sequence[Nvfp4Weight], kernels: FusedKernels, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.elements = _E2m1Rows([nibbles_of(weight.packed) for weight in weights], kernels)
        scales = torch.cat([weight.scales.float().T for weight in weights])
        self.scales = _parameter(scales[:, None].to(dtype))
        """[G, 1, N]"""
        self.factors = _parameter(torch.stack([weight.factors for weight in weights])[:, None])
        """[weights, 1, N]"""

    def widened(self, dtype: torch.dtype, part: Part = whole) -> Tensor:
        kept, factors = part(self.scales), part(self.factors)
        scales = kept.float().unflatten(0, (len(factors), -1)) * factors[:, None]
        elements = self.elements.widened(dtype, part).float().unflatten(0, (len(kept), -1))
        return (elements * scales.flatten(0, 1)).flatten(0, 1).to(dtype)


class _MinimumRows(LowBitWeight):
    """Integers times a scale, minus a minimum, computed in float32.

    Args:
        weights: weights on the host.
        kernels: the card's kernels for 4 bits; None: the values are bytes.
    """

    def __init__(self, weights: Sequence[MinimumWeight], kernels: FusedKernels | None) -> None:
        super().__init__()
        self.scales = _FactorRows([weight.scales for weight in weights])
        self.minimums = _FactorRows([weight.minimums for weight in weights])
        codes = [weight.codes for weight in weights]
        self.words = None if kernels is None else _WholeNumbers(codes, 0, kernels)
        self.register_parameter("numbers", None)
        if kernels is None:
            rows = torch.cat([each.T for each in codes]).contiguous()
            # Codes of up to 5 bits are also valid as int8.
            self.numbers = _parameter(rows.view(torch.int8))

    def widened(self, dtype: torch.dtype, part: Part = whole) -> Tensor:
        if self.words is not None:
            numbers = self.words.widened(dtype, part).float()
        else:
            numbers = part(self.numbers).float()
        scales, minimums = self.scales.values(part), self.minimums.values(part)
        grouped = numbers.unflatten(0, (len(scales), -1))
        return (grouped * scales - minimums).flatten(0, 1).to(dtype)


class _FactorRows(nn.Module):
    """The `GroupScales` of weights, one row for each group."""

    def __init__(self, scales: Sequence[GroupScales]) -> None:
        super().__init__()
        self.factors = _parameter(torch.cat([each.factors.T for each in scales])[:, None])
        self.multipliers = _parameter(torch.cat([each.multipliers.T for each in scales]))

    def values(self, part: Part) -> Tensor:
        """Return the scales as [G, 1, N] float32."""
        factors = part(self.factors)
        multipliers = part(self.multipliers).float()
        return (multipliers.unflatten(0, (len(factors), -1)) * factors).flatten(0, 1)[:, None]


def _packed(numbers: Sequence[Tensor]) -> Tensor:
    """Pack 4-bit values [N, inputs] uint8 of each weight into [all inputs, N / 8] int32 words."""
    return pack_nibbles(torch.cat([each.T for each in numbers]).contiguous())


def _parameter(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.contiguous(), requires_grad=False)
