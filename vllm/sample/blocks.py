"""Reductions over the vocabulary in blocks: maximum, argmax, top k, one random draw.

A vocabulary of V tokens is B blocks of 128. One fast pass reduces each block to a number; the rest
looks at B numbers and at the few blocks that matter:

    logits   [n, V]   | 128 | 128 | 128 | ... |      one vectorised pass
    maxima   [n, B]   |  *  |     |  *  | ... |      argmax, top k or cumsum here
    chosen   [n, k, 128]                             and then here

On a CPU this is several times faster than argmax, topk and cumsum over V. Every step has a shape
known beforehand, reads nothing back to the host, and treats each row alone: a row gives the same
bits in any batch.
"""

import torch
from torch import Tensor

from vllm.sample.buffers import Buffers

BLOCK_SIZE = 128

_BLOCKS_PER_CANDIDATE = 6
"""Searching k blocks pays off while the vocabulary has this many times more."""


def padded_copy(logits: Tensor, buffers: Buffers) -> Tensor:
    """[n, V] of any float dtype -> [n, P] float32 in the buffer "logits".

    P is a multiple of the block size and above V, so that there is a column that is no token.
    Columns from V on are -inf.
    """
    num_rows, vocab_size = logits.shape
    width = (vocab_size // BLOCK_SIZE + 1) * BLOCK_SIZE
    copy = buffers.take("logits", (num_rows, width), logits.device)
    copy[:, :vocab_size] = logits
    copy[:, vocab_size:] = float("-inf")
    return copy


def as_whole_blocks(logits: Tensor, buffers: Buffers) -> Tensor:
    """[n, V] of any float dtype -> [n, P] float32, P a multiple of the block size.

    May be `logits` itself, so it is only to be read. Columns from V on are -inf.
    """
    if logits.dtype == torch.float32 and logits.shape[-1] % BLOCK_SIZE == 0:
        return logits
    return padded_copy(logits, buffers)


def split_blocks(values: Tensor) -> Tensor:
    """[n, B * 128] -> [n, B, 128], a view."""
    return values.view(values.shape[0], -1, BLOCK_SIZE)


def block_max(logits: Tensor) -> Tensor:
    """[n, V] -> [n, B] largest value of each block; the last block may be short.

    NaN in a block gives NaN.
    """
    vocab_size = logits.shape[-1]
    whole = vocab_size - vocab_size % BLOCK_SIZE
    if whole == vocab_size:
        return split_blocks(logits).amax(-1)
    tail = logits[:, whole:].amax(-1, keepdim=True)
    return torch.cat([split_blocks(logits[:, :whole]).amax(-1), tail], -1) if whole else tail


def argmax(logits: Tensor, maxima: Tensor) -> Tensor:
    """[n] int64 index of each row's largest value, the first one if there are several.

    Args:
        logits: [n, V].
        maxima: [n, B] of `block_max(logits)`.
    """
    start = maxima.argmax(-1, keepdim=True) * BLOCK_SIZE
    offsets = torch.arange(BLOCK_SIZE, device=logits.device)
    # A short last block repeats its last value, which cannot come before itself.
    indices = (start + offsets).clamp_max(logits.shape[-1] - 1)
    inside = logits.gather(-1, indices).argmax(-1, keepdim=True)
    return indices.gather(-1, inside).squeeze(-1)


def top_values(logits: Tensor, maxima: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row and their indices, largest first.

    The k largest values lie in the k blocks with the largest maxima, so only those are searched
    when k is small.

    Args:
        logits: [n, V], V a multiple of the block size.
        maxima: [n, B] of `block_max(logits)`.
        k: at most V.

    Returns:
        [n, k] values and [n, k] int64 indices. Which of several equal values is at the end of
        the list is not defined.
    """
    if k * _BLOCKS_PER_CANDIDATE > maxima.shape[-1]:
        values, indices = logits.topk(k, dim=-1)
        return values, indices
    blocks = maxima.topk(k, dim=-1).indices
    offsets = torch.arange(BLOCK_SIZE, device=logits.device)
    candidates = (blocks[:, :, None] * BLOCK_SIZE + offsets).flatten(1)
    values, inside = logits.gather(-1, candidates).topk(k, dim=-1)
    return values, candidates.gather(-1, inside)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One index per row, with probability proportional to its weight.

    The inverse of the cumulative distribution in the order of the indices: the first index at
    which the running sum exceeds u times the total, found by block and then inside the block.

    Args:
        weights: [n, B, 128] float32, at least 0, with a positive one in each row.
        uniforms: [n] float32 in (0, 1).

    Returns:
        [n] int64 in [0, B * 128). Never an index of weight 0.
    """
    sums = weights.sum(-1)
    block, rest = _invert(sums, uniforms[:, None], scale_by_total=True)
    chosen = weights.gather(1, block[:, :, None].expand(-1, -1, BLOCK_SIZE)).squeeze(1)
    inside, _ = _invert(chosen, rest, scale_by_total=False)
    return (block * BLOCK_SIZE + inside).squeeze(-1)


def _invert(weights: Tensor, target: Tensor, *, scale_by_total: bool) -> tuple[Tensor, Tensor]:
    """First index [n, 1] of weights [n, m] whose running sum exceeds target [n, 1].

    Also returns by how much the target exceeds the running sum before that index, at least 0.
    """
    sums = weights.cumsum(-1)
    if scale_by_total:
        target = target * sums[:, -1:]
    index = torch.searchsorted(sums, target, right=True).clamp_max(weights.shape[-1] - 1)
    # Rounding can lift the target to the total, and a parallel cumsum need not be monotone: then
    # the index may have no weight, and the row takes its likeliest one.
    has_weight = weights.gather(-1, index) > 0
    index = torch.where(has_weight, index, weights.argmax(-1, keepdim=True))
    before = sums.gather(-1, index) - weights.gather(-1, index)
    return index, (target - before).clamp_min(0)
