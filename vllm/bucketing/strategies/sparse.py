"""Sparse bucketing: exponential sizes without filling gaps, limited to possible batches.

It has the fewest buckets of the three strategies. Differences from `exponential`:

- sizes that collide after rounding are dropped, and a minimum of 0 or 1 is a size of its own;
- prompts run one by one;
- no size is above its maximum;
- no decode bucket has fewer blocks than sequences, or more than its sequences can reference.
"""

from dataclasses import dataclass
from itertools import product, starmap

from vllm.bucketing.bucket import Bucket, decode, prefill
from vllm.bucketing.step_limits import StepLimits, round_up
from vllm.bucketing.strategies.exponential import (
    LONG_CONTEXT_TOKENS,
    ExponentialRange,
    exponential_range,
    num_powers,
)


@dataclass(frozen=True, kw_only=True)
class SparseSettings:
    """The ranges of sparse bucketing, derived from the limits of a step."""

    prompt_bs: ExponentialRange
    prompt_seq: ExponentialRange
    prompt_context: ExponentialRange | None
    """None: a prompt never has context."""
    decode_bs: ExponentialRange
    decode_block: ExponentialRange

    @classmethod
    def derive(cls, limits: StepLimits, max_prefill_batch: int = 1) -> "SparseSettings":
        """Derive ranges with as many sizes as there are powers of two, one less for the lengths."""
        block, longest = limits.block_size, round_up(limits.max_query_len, limits.block_size)
        seqs, max_blocks = limits.max_num_seqs, limits.max_blocks
        return cls(
            prompt_bs=ExponentialRange.up_to(1, 2, max_prefill_batch),
            prompt_seq=ExponentialRange(block, block, longest, max(1, num_powers(longest) - 1)),
            prompt_context=_context_range(limits) if limits.has_context else None,
            decode_bs=ExponentialRange.up_to(1, 2, seqs),
            decode_block=ExponentialRange.up_to(1, min(seqs, max_blocks), max_blocks),
        )


def sparse_range(sizes: ExponentialRange) -> list[int]:
    """Return the sizes in ascending order, none above `max`.

    >>> sparse_range(ExponentialRange(1, 2, 64, 7))
    [1, 2, 4, 8, 12, 22, 36, 64]
    """
    if sizes.min > 1:
        found = exponential_range(sizes, fill=False)
    else:
        from_step = ExponentialRange(sizes.step, sizes.step, sizes.max, sizes.limit)
        found = [sizes.min, *exponential_range(from_step, fill=False)]
    return sorted({min(size, sizes.max) for size in found})


def sparse_prefill_buckets(settings: SparseSettings, limits: StepLimits) -> list[Bucket]:
    """Return prefill buckets: combinations of batch size, length and context block count.

    The largest context differs by length: it is the context that the shortest prompt padded to this
    length can have.
    """
    batches, lengths = sparse_range(settings.prompt_bs), sparse_range(settings.prompt_seq)
    context = settings.prompt_context
    smaller = [] if context is None else sparse_range(context)[:-1]
    buckets: set[Bucket] = set()
    for batch in batches:
        for shorter, length in zip([0, *lengths], lengths, strict=False):
            most = limits.max_context_blocks(shorter + 1)
            counts = {most, *(min(blocks, most) for blocks in smaller)}
            buckets.update(prefill(batch, length, blocks) for blocks in counts)
    return sorted(buckets)


def sparse_decode_buckets(settings: SparseSettings, limits: StepLimits) -> list[Bucket]:
    """Return decode buckets: batch sizes with the block counts that their sequences can have."""
    pairs = product(sparse_range(settings.decode_bs), sparse_range(settings.decode_block))
    possible = {
        (batch, min(blocks, batch * limits.max_blocks_per_seq))
        for batch, blocks in pairs
        if batch <= blocks
    }
    return sorted(starmap(decode, possible))


def _context_range(limits: StepLimits) -> ExponentialRange:
    """Return the range from 0 to the context of the longest chunk, or of the shortest if contexts
    are short.
    """
    if limits.max_model_len >= LONG_CONTEXT_TOKENS:
        new_tokens = limits.max_query_len
    else:
        new_tokens = limits.block_size
    most = max(1, (limits.max_seq_len - new_tokens) // limits.block_size)
    return ExponentialRange(0, 1, most, 2 if most == 1 else num_powers(most))
