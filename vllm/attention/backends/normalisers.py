"""Values that are subtracted from the scores of a decode, if that is one value per request and
head.

An alternative to the maximum of each block with a correction afterwards: fewer steps, but the
exponentials of a row whose blocks differ much may underflow. Only `index_reduce` and
`scatter_reduce` are the maximum of the row, and exact for all scores.

Letters: N entries of the block list, H query heads.
"""

import torch
from torch import Tensor

from vllm.attention.backends.flat_pa import (
    HIDDEN,
    DecodeBlocks,
    Normaliser,
    max_of_rows,
    sum_of_rows,
)
from vllm.errors import ConfigError


def amax(block_max: Tensor, blocks: DecodeBlocks) -> Tensor:
    """Return the maximum of all scores."""
    return block_max.amax().expand_as(block_max)


def head_amax(block_max: Tensor, blocks: DecodeBlocks) -> Tensor:
    """Return the maximum of each head."""
    return block_max.amax(0, keepdim=True).expand_as(block_max)


def wsum(block_max: Tensor, blocks: DecodeBlocks) -> Tensor:
    """Return the mean of the maxima of the blocks of each request. A block that is all hidden has
    none."""
    is_hidden = block_max == HIDDEN
    maxima = sum_of_rows(block_max.masked_fill(is_hidden, 0.0), blocks)
    return maxima / sum_of_rows((~is_hidden).float(), blocks).clamp(min=1)


def scatter_reduce(block_max: Tensor, blocks: DecodeBlocks) -> Tensor:
    """Return the maximum of each request."""
    maxima = block_max.new_full((blocks.summing.shape[0], *block_max.shape[1:]), HIDDEN)
    rows = blocks.rows[:, None, None].expand_as(block_max)
    return maxima.scatter_reduce(0, rows, block_max, "amax").index_select(0, blocks.rows)


def in_sequence(*steps: Normaliser) -> Normaliser:
    """Apply each step to the result of the previous ones."""

    def normalise(block_max: Tensor, blocks: DecodeBlocks) -> Tensor:
        total = torch.zeros_like(block_max)
        for step in steps:
            total = total + step(block_max - total, blocks)
        return total

    return normalise


NORMALISERS: dict[str, Normaliser] = {
    "amax": amax,
    "head_amax": head_amax,
    "wsum": wsum,
    "wsum_head_amax": in_sequence(wsum, head_amax),
    "index_reduce": max_of_rows,
    "scatter_reduce": scatter_reduce,
}


def parse_normaliser(names: str) -> Normaliser:
    """Make a normaliser from a comma-separated list of names, applied in sequence.

    Raises:
        ConfigError: a name is unknown.
    """
    stripped = [name.strip() for name in names.split(",")]
    for name in stripped:
        if name not in NORMALISERS:
            known = ", ".join(NORMALISERS)
            raise ConfigError(f"softmax normaliser {name!r} is unknown; there are: {known}")
    steps = [NORMALISERS[name] for name in stripped]
    return steps[0] if len(steps) == 1 else in_sequence(*steps)
