"""Apply min_p, top_k and top_p as thresholds: a request keeps the tokens whose logit is at least
its floor.

They are applied in this order, each to the distribution that the previous one left. A threshold
cannot distinguish equal logits, so all tokens that tie at the limit are kept (and top_p counts only
k of them).

Nothing sorts the vocabulary. top_k finds the k-th value. top_p after top_k reads these k values.
top_p without top_k bisects for the threshold of the wanted mass: a fixed number of passes over the
weights, the same for every input.
"""

import math

import torch
from torch import Tensor

from vllm.sample.block_reductions import split_blocks, top_values
from vllm.sample.buffers import Buffers
from vllm.sample.features import Param
from vllm.sample.metadata import SamplingMetadata

_NUM_BISECTIONS = 18
"""Halvings of an interval of logarithms of about 25: 1e-4 is left."""


def logit_floor(
    logits: Tensor, maxima: Tensor, top: Tensor, metadata: SamplingMetadata
) -> Tensor | None:
    """Return the smallest logit that each request keeps after min_p, top_k, and top_p if the
    request has a top_k.

    Args:
        logits: [n, P] float32 before temperature, P a multiple of the block size.
        maxima: [n, B], result of `block_max(logits)`.
        top: [n, 1] largest logit.
        metadata: metadata of the batch.

    Returns:
        [n, 1], -inf for requests that keep all tokens; None if no request drops a token here.
    """
    floor = None
    if (min_p := metadata.param(Param.MIN_P)) is not None:
        # Condition on the logits before temperature for p(t) >= min_p * p(top). log(0) = -inf keeps
        # all.
        floor = top + _column(metadata.param(Param.TEMPERATURE)) * min_p[:, None].log()
    if (top_k := metadata.top_k) is not None:
        limited = _top_k_floor(logits, maxima, top, floor, top_k[:, None], metadata)
        floor = limited if floor is None else torch.maximum(floor, limited)
    return floor


def _top_k_floor(
    logits: Tensor,
    maxima: Tensor,
    top: Tensor,
    floor: Tensor | None,
    top_k: Tensor,
    metadata: SamplingMetadata,
) -> Tensor:
    """Return the floor [n, 1] of top_k [n, 1], and of top_p among these k tokens; -inf for requests
    without top_k.
    """
    assert metadata.max_top_k is not None
    width = min(metadata.max_top_k, logits.shape[-1])
    values = top_values(logits, maxima, width)
    last = (top_k - 1).clamp(0, width - 1)
    if (top_p := metadata.param(Param.TOP_P)) is not None:
        position = torch.arange(width, dtype=torch.int32, device=logits.device)
        kept = position < top_k
        if floor is not None:
            kept &= values >= floor
        weights = likelihoods(values, top, metadata.param(Param.TEMPERATURE)).masked_fill(
            ~kept, 0.0
        )
        sums = weights.cumsum(-1)
        # A token is kept if the more likely tokens together have not reached top_p; the top token
        # always is.
        is_short = sums < top_p[:, None] * sums[:, -1:]
        short = torch.sum(is_short, -1, keepdim=True, dtype=torch.int32)
        nucleus = torch.where(top_p[:, None] < 1, short, last)
        last = torch.minimum(last, nucleus)
    return torch.where(top_k > 0, values.gather(-1, last.long()), float("-inf"))


def nucleus_floor(
    weights: Tensor, top_p: Tensor, vocab_size: int, buffers: Buffers | None
) -> Tensor:
    """Return the smallest weight in the smallest set of tokens that has the fraction top_p of the
    mass.

    This is the threshold of nucleus sampling (Holtzman et al., arXiv:1904.09751) without a sort:
    the mass of the tokens above a threshold decreases as the threshold grows, so it is found by
    bisection on the logarithm. Tokens whose probability differs from the last one's by less than
    1/10,000 count as equal.

    Args:
        weights: [n, P] float32 likelihoods relative to the most likely token, which has 1.
        top_p: [n] in (0, 1]; 1 keeps all.
        vocab_size: at most this many weights are not 0.
        buffers: buffers; see `keep_from`.

    Returns:
        [n, 1], at most 1; 0 if top_p is 1.
    """
    total = _mass(weights)
    target = top_p[:, None] * total
    # Below this weight, all tokens of the vocabulary together weigh less than what top_p may drop.
    spare = (1 - top_p[:, None]) * total / (2 * vocab_size)
    low = spare.clamp_min(torch.finfo(torch.float32).tiny).log2()
    step = -low
    for _ in range(_NUM_BISECTIONS):
        step = step / 2
        middle = low + step
        enough = _mass(keep_from(weights, middle.exp2(), buffers).mul_(weights)) >= target
        low = torch.where(enough, middle, low)
    return torch.where(top_p[:, None] < 1, low.exp2(), 0.0)


def likelihoods(
    logits: Tensor, top: Tensor, temperature: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Compute exp((logits - top) / temperature): [n, m] float32, the most likely token has 1.

    Args:
        logits: [n, m] float32.
        top: [n, 1] largest logit of each request.
        temperature: [n]; None: 1.
        out: [n, m] output; None: allocate it.
    """
    # Subtract first: the difference of two close values is exact. On a CPU, exp2 takes a third of
    # the time of exp.
    scale = math.log2(math.e) / _column(temperature)
    return torch.sub(logits, top, out=out).mul_(scale).exp2_()


def keep_from(values: Tensor, floor: Tensor, buffers: Buffers | None) -> Tensor:
    """Return 1.0 where values [n, m] >= floor [n, 1], else 0.0.

    Args:
        values: float32.
        floor: float32.
        buffers: buffers of a CPU; the result is in the buffer "mask". There torch vectorises a
            comparison to floats and a multiplication by them, which is ten times faster than with
            bools. None: the comparison gives bools, because the compiler of a Gaudi card fixes its
            type.
    """
    if buffers is None:
        return (values >= floor).to(values.dtype)
    return torch.ge(values, floor, out=buffers.get_like("mask", values))


def _mass(weights: Tensor) -> Tensor:
    """Sum [n, P] to [n, 1], in an order that does not depend on n or on padding.

    torch divides a plain sum of a single row among threads, and the order of a vectorised sum
    depends on its length.
    """
    return split_blocks(weights).sum(-1).cumsum(-1)[:, -1:]


def _column(values: Tensor | None) -> Tensor | float:
    return 1.0 if values is None else values[:, None]
