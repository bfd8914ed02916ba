"""Compute the value that is subtracted from the scores of a decode: one value per request and head.

It replaces the maximum of each block with a correction afterwards. This needs fewer steps, but the
exponentials of a request whose blocks differ much may underflow. Only `index_reduce` and
`scatter_reduce` give the maximum of the request, and are exact for all scores.

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
from vllm.config.hpu import read_normalisers


def amax(block_max: Tensor, blocks: DecodeBlocks) -> Tensor:
    """Return the maximum of all scores, for every entry and head."""
    return block_max.amax().expand_as(block_max)


def head_amax(block_max: Tensor, blocks: DecodeBlocks) -> Tensor:
    """Return the maximum of each head, for every entry."""
    return block_max.amax(0, keepdim=True).expand_as(block_max)


def wsum(block_max: Tensor, blocks: DecodeBlocks) -> Tensor:
    """Return the mean of the block maxima of each request. Blocks without visible keys do not
    count.
    """
    is_hidden = block_max == HIDDEN
    maxima = sum_of_rows(block_max.masked_fill(is_hidden, 0.0), blocks)
    return maxima / sum_of_rows((~is_hidden).float(), blocks).clamp(min=1)


def scatter_reduce(block_max: Tensor, blocks: DecodeBlocks) -> Tensor:
    """Return the maximum of each request."""
    maxima = block_max.new_full((blocks.summing.shape[0], *block_max.shape[1:]), HIDDEN)
    rows = blocks.rows[:, None, None].expand_as(block_max)
    return maxima.scatter_reduce(0, rows, block_max, "amax").index_select(0, blocks.rows)


def in_sequence(*steps: Normaliser) -> Normaliser:
    """Return a normaliser that applies each step to the result of the previous one."""

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
    """Return the normaliser for a comma-separated list of names, which are applied in sequence.

    Raises:
        ConfigError: a name is unknown.
    """
    steps = [NORMALISERS[name] for name in read_normalisers(names)]
    return steps[0] if len(steps) == 1 else in_sequence(*steps)
