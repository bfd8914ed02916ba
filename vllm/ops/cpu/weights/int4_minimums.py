"""Weights of 4 or 5 bits with a minimum for each block, in the layout of the C++ kernels.

csrc/cpu/linear_format.h documents the layout. Knows no files and no kernels.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops.stored_weight import MinimumWeight

FACTOR_INPUTS = 512
"""The number of inputs with the same factors must divide this number."""


@dataclass(frozen=True, kw_only=True)
class MinimumGroups:
    """The groups of inputs of a weight with scales and minimums."""

    block_inputs: int
    """Inputs that share a multiplier."""
    factor_inputs: int
    """Inputs that share a factor."""
    zeros: None = None
    order: None = None


def minimum_panels(weight: MinimumWeight, panel: int) -> Tensor:
    """Pack a weight into panels of `panel` outputs, [bytes] uint8.

    The last panel is padded with zeros.
    """
    num_out, num_in = weight.shape
    num_factors, num_blocks = weight.scales.factors.shape[1], weight.scales.multipliers.shape[1]
    padding = -num_out % panel

    def in_panels(values: Tensor, *sizes: int) -> Tensor:
        """Pad and reshape [num_out, columns] to [panels, panel, factors, *sizes]."""
        return F.pad(values, (0, 0, 0, padding)).view(-1, panel, num_factors, *sizes)

    per_factor = num_blocks // num_factors
    codes = in_panels(weight.codes, per_factor, num_in // num_blocks // 8, 8)
    low = codes & 15
    words = _words(low[..., :4] | low[..., 4:] << 4)[..., 0]
    parts = [
        _words(in_panels(scales.multipliers, per_factor).permute(0, 2, 3, 1))
        for scales in (weight.scales, weight.minimums)
    ]
    # Byte j has the fifth bits of the inputs j, j + 4, ..., j + 28, from the lowest bit on.
    if weight.bits == 5:
        high = (codes >> 4).flatten(-2).unflatten(-1, (8, 4))
        bits = high << torch.arange(8, dtype=torch.uint8)[:, None]
        parts.append(_words(bits.sum(-2, dtype=torch.uint8))[..., 0].permute(0, 2, 3, 1))
    parts.append(words.permute(0, 2, 3, 4, 1).flatten(-2))
    blocks = torch.cat(parts, -1).flatten(-2)
    factors = [
        _words(in_panels(scales.factors.half()).transpose(1, 2))
        for scales in (weight.scales, weight.minimums)
    ]
    return torch.cat([*factors, blocks], -1).flatten().view(torch.uint8)


def _words(values: Tensor) -> Tensor:
    """View values of some bytes each [..., n] as int32 words, [..., n * bytes / 4]."""
    # Flattened first, because the stride of a dimension of size 1 is arbitrary.
    flat = values.flatten().view(torch.int32)
    return flat.view(*values.shape[:-1], -1)
