"""Compute reductions over the vocabulary in blocks: maximum, argmax, top k, one random draw.

A vocabulary of V tokens is divided into B blocks of 128. One fast pass reduces each block to a
value; the other steps read these B values and the few blocks that matter:

    logits   [n, V]   | 128 | 128 | 128 | ... |      one vectorised pass
    maxima   [n, B]   |  *  |     |  *  | ... |      argmax, top k or cumsum here
    chosen   [n, k, 128]                             and then here

On a CPU this is several times faster than argmax, topk and cumsum over V. Every step has a shape
that is known beforehand, reads nothing back to the host, and handles each request separately: the
result for a request is the same, bit by bit, in any batch.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm.sample.buffers import Buffers

BLOCK_SIZE = 128

_BLOCKS_PER_CANDIDATE = 6
"""Searching only k blocks is faster while the vocabulary has at least this many times k blocks."""


def padded_copy(logits: Tensor, buffers: Buffers | None) -> Tensor:
    """Copy [n, V] of any float dtype to [n, P] float32 in the buffer "logits".

    P is a multiple of the block size and above V, so that there is a column that is not a token.
    Columns from V on are -inf. Without buffers the result is new memory, and no part of it is
    written through a view, because a Gaudi card would copy it.
    """
    num_rows, vocab_size = logits.shape
    width = (vocab_size // BLOCK_SIZE + 1) * BLOCK_SIZE
    if buffers is None:
        return pad(logits, (0, width - vocab_size), value=float("-inf")).float()
    copy = buffers.get("logits", (num_rows, width), logits.device)
    copy[:, :vocab_size] = logits
    copy[:, vocab_size:].fill_(float("-inf"))
    return copy


def as_whole_blocks(logits: Tensor, buffers: Buffers | None) -> Tensor:
    """Convert [n, V] of any float dtype to [n, P] float32, P a multiple of the block size.

    The result may be `logits` itself, so do not write to it. Columns from V on are -inf.
    """
    if logits.dtype == torch.float32 and logits.shape[-1] % BLOCK_SIZE == 0:
        return logits
    return padded_copy(logits, buffers)


def split_blocks(values: Tensor) -> Tensor:
    """View [n, B * 128] as [n, B, 128]."""
    return values.view(values.shape[0], -1, BLOCK_SIZE)


def block_max(logits: Tensor) -> Tensor:
    """Return the largest value of each block of logits [n, V]: [n, B]. The last block may be short.

    NaN in a block gives NaN.
    """
    vocab_size = logits.shape[-1]
    whole = vocab_size - vocab_size % BLOCK_SIZE
    if whole == vocab_size:
        return split_blocks(logits).amax(-1)
    tail = logits[:, whole:].amax(-1, keepdim=True)
    return torch.cat([split_blocks(logits[:, :whole]).amax(-1), tail], -1) if whole else tail


def argmax(logits: Tensor, maxima: Tensor) -> Tensor:
    """Return the index [n] int32 of the largest value of each request, the first one if there are
    several.

    Args:
        logits: [n, V].
        maxima: [n, B], result of `block_max(logits)`.
    """
    start = maxima.argmax(-1, keepdim=True).int() * BLOCK_SIZE
    offsets = torch.arange(BLOCK_SIZE, dtype=torch.int32, device=logits.device)
    # A short last block repeats its last value; argmax returns the first of equal values, so the
    # result does not change.
    indices = (start + offsets).clamp_max(logits.shape[-1] - 1)
    inside = logits.gather(-1, indices.long()).argmax(-1, keepdim=True).int()
    return (start + inside).clamp_max(logits.shape[-1] - 1).squeeze(-1)


def top_values(logits: Tensor, maxima: Tensor, k: int) -> Tensor:
    """Return the k largest values of each request, largest first: [n, k].

    The k largest values are in the k blocks with the largest maxima, so only these are searched if
    k is small.

    Args:
        logits: [n, V], V a multiple of the block size.
        maxima: [n, B], result of `block_max(logits)`.
        k: number of values, at most V.
    """
    candidates = _candidates(maxima, k)
    if candidates is not None:
        logits = logits.gather(-1, candidates.long())
    return logits.topk(k, dim=-1).values


def top_tokens(logits: Tensor, maxima: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values of each request and their indices.

    Returns:
        [n, k] values and [n, k] int32 indices. If several values at the end of the list are equal,
        it is not defined which are included.
    """
    candidates = _candidates(maxima, k)
    if candidates is None:
        values, indices = logits.topk(k, dim=-1)
        return values, indices.int()
    values, inside = logits.gather(-1, candidates.long()).topk(k, dim=-1)
    # A Gaudi in eager mode has no gather of int64.
    return values, candidates.gather(-1, inside)


def _candidates(maxima: Tensor, k: int) -> Tensor | None:
    """Return the token indices [n, k * 128] int32 of the k blocks with the largest maxima; None:
    search all blocks.
    """
    if k * _BLOCKS_PER_CANDIDATE > maxima.shape[-1]:
        return None
    blocks = maxima.topk(k, dim=-1).indices.int()
    offsets = torch.arange(BLOCK_SIZE, dtype=torch.int32, device=maxima.device)
    return (blocks[:, :, None] * BLOCK_SIZE + offsets).flatten(1)


def num_draws(vocab_size: int) -> int:
    """Return how many random numbers `draw` needs per request: one per block, and one per token of
    a block.
    """
    return vocab_size // BLOCK_SIZE + 1 + BLOCK_SIZE


def draw(weights: Tensor, exponentials: Tensor) -> Tensor:
    """Draw one index per request, with probability proportional to its weight.

    This is an exponential race (equivalent to the Gumbel-max trick, Maddison et al.,
    arXiv:1411.0030): of waiting times e / w, with e exponentially distributed, the smallest has the
    index i with probability w_i / sum(w). The race runs first among the blocks, then among the
    tokens of the winning block.

    The inverse of the cumulative distribution would need one random number instead of a few
    hundred. But each of its thousands of boundaries moves with every rounding error before it, so a
    token would depend on the batch a thousand times more often than here, where an error matters
    only if it changes the winner.

    Args:
        weights: [n, B, 128] float32, at least 0, with a positive one for each request.
        exponentials: [n, K] float32 above 0, K at least B + 128: the first B for the blocks, the
            last 128 for the tokens inside a block.

    Returns:
        [n] int32 in [0, B * 128). Never an index of weight 0.
    """
    block = _race(weights.sum(-1), exponentials[:, : weights.shape[1]])
    chosen = weights.gather(1, block[:, :, None].expand(-1, -1, BLOCK_SIZE)).squeeze(1)
    inside = _race(chosen, exponentials[:, -BLOCK_SIZE:])
    return (block.int() * BLOCK_SIZE + inside.int()).squeeze(-1)


def _race(weights: Tensor, exponentials: Tensor) -> Tensor:
    """Return the index [n, 1] of the smallest exponential waiting time for weights [n, m]."""
    index = (weights / exponentials).argmax(-1, keepdim=True)
    # All quotients may underflow to 0. Then choose the most likely token of the row.
    has_weight = weights.gather(-1, index) > 0
    return torch.where(has_weight, index, weights.argmax(-1, keepdim=True))
