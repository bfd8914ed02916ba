"""Linear bucketing: few small sizes, doubling, then one every `step`.

ramp-up  min, 2*min, 4*min, ...   while below step: small batches waste little
stable   step, 2*step, ...        up to max
"""

from collections.abc import Sequence
from itertools import pairwise, product

from vllm.bucketing.bucket import Bucket, decode, prefill
from vllm.bucketing.settings import BucketRange, BucketSettings
from vllm.bucketing.step_limits import StepLimits, ceil_div, round_up
from vllm.errors import ConfigError

_FINE_CONTEXT = (1024, 4096)
"""Tokens of context of a single prompt, below the counts that double."""


def linear_range(min: int, step: int, max: int) -> list[int]:
    """Return sizes from `min` to `max`, ascending. `max` itself is one only when a step reaches it.

    A `min` of 0 stands for "none at all", and is followed by the range from `step` on.

    >>> linear_range(2, 32, 64)
    [2, 4, 8, 16, 32, 64]
    >>> linear_range(1, 32, 50)
    [1, 2, 4, 8, 16, 32]
    >>> linear_range(0, 2, 6)
    [0, 2, 4, 6]

    Raises:
        ConfigError: min is above max.
    """
    if min > max:
        raise ConfigError(
            f"Min. batch size cannot be greater than max. batch size ({min} > {max}). Lower the "
            f"first or raise the second"
        )
    if min == 0:
        return [0] if max < step else [0, *linear_range(step, step, max)]
    sizes = []
    size = min
    while size < step and size <= max:
        sizes.append(size)
        size *= 2
    return sizes + [stable for stable in range(step, max + 1, step) if stable >= min]


def linear_prefill_buckets(
    settings: BucketSettings, limits: StepLimits, *, every_context: bool = False
) -> list[Bucket]:
    """Combine batch sizes with lengths, and with context: see `linear_context`.

    Batches with context have lengths that at least double: prompts of a step that differ much are
    launched apart, which costs little. Behind `max_fine_len` tokens follow a few for single
    prompts: see `_long_buckets`.

    Args:
        settings: the ranges.
        limits: what a launch can ask for.
        every_context: the fork's set, to compare with: each number that fits beside the prompt.

    Raises:
        ConfigError: the ranges hold nothing.
    """
    batches = linear_range(*settings.prompt_bs.as_tuple())
    lengths = linear_range(*settings.prompt_seq.as_tuple())
    if not batches or not lengths:
        raise _no_buckets(settings.prompt_bs, settings.prompt_seq, "seq")
    if every_context:
        return [
            prefill(batch, length, blocks)
            for batch, length in product(batches, lengths)
            for blocks in _every_context(limits, length)
        ]
    max_fine_len = settings.max_fine_len or limits.max_seq_len
    found = [prefill(batch, length) for batch, length in product(batches, lengths)]
    for batch in batches:
        sizes = lengths if batch == 1 else _doubling(lengths)
        for shorter, length in pairwise([0, *sizes]):
            counts = linear_context(limits, batch, shorter, length, max_fine_len)
            found += [prefill(batch, length, blocks) for blocks in counts if blocks]
    if max_fine_len < limits.max_seq_len:
        found += _long_buckets(limits, batches[0], lengths, max_fine_len)
    return sorted(found)


def linear_context(
    limits: StepLimits, batch: int, shorter: int, length: int, max_fine_len: int
) -> list[int]:
    """Return context block counts: none, `_FINE_CONTEXT`, then doubling, and the most of sequences
    of `max_fine_len` tokens, unless the previous count is nearly as large. In a batch: none and the
    most.

    The most is what the shortest prompt that is padded to `length` can have before it, so that
    none is left without a bucket; in a batch it is also what the token budget leaves. What is
    beyond the budget without any context (`vllm.bucketing.step_limits`) gets none.

    The fork has every count (0, 1, 2, 3, ...): hundreds to thousands of prompt buckets, each of
    which is compiled and may take a graph. A block of context costs a token of a prompt 1/256 of
    its linear layers (`padded_cost`), so up to 8 blocks instead of 1 cost 3 %, and up to 32
    instead of 9 cost 9 %. benchmarks/history.md has the counts and the padding.

    Args:
        limits: what a launch can ask for.
        batch: prompts of the bucket.
        shorter: the next smaller length, 0 for the smallest.
        length: of the bucket.
        max_fine_len: tokens of context and prompt together.
    """
    most = _most_context(limits, batch, shorter, length)
    least = shorter if batch == 1 else 0  # in a batch, another request may have the context
    most = min(most, max(0, ceil_div(max_fine_len - least - 1, limits.block_size)))
    counts = [0]
    if batch == 1:
        fine = [ceil_div(tokens, limits.block_size) for tokens in _FINE_CONTEXT]
        counts += [size for size in fine if 3 * size <= 2 * most]
        size = 2 * fine[-1]
        while 3 * size <= 2 * most:
            counts.append(size)
            size *= 2
    return sorted({*counts, most})


def _long_buckets(
    limits: StepLimits, batch: int, lengths: Sequence[int], max_fine_len: int
) -> list[Bucket]:
    """Return buckets for sequences of more than `max_fine_len` tokens, which are rare.

    Nearly all work of a long prompt is in pieces of the longest length, so that has context counts
    that double. Others are the end of a prompt: lengths that at least double, with counts that are
    each four times the one before.
    """
    doubling = _doubling(lengths)
    found = []
    for shorter, length in pairwise([0, *doubling]):
        most = _most_context(limits, batch, shorter, length)
        factor = 2 if length == doubling[-1] else 4
        blocks = factor * ceil_div(max_fine_len, limits.block_size)
        while blocks < most:
            found.append(prefill(batch, length, blocks))
            blocks *= factor
        found.append(prefill(batch, length, most))
    return found


def _doubling(lengths: Sequence[int]) -> list[int]:
    """Return the largest length, and the shorter ones that are at most half of the next one."""
    doubling = [lengths[-1]]
    for length in reversed(lengths):
        if 2 * length <= doubling[0]:
            doubling.insert(0, length)
    return doubling


def _most_context(limits: StepLimits, batch: int, shorter: int, length: int) -> int:
    """Return the context blocks of a bucket whose prompts are longer than `shorter`."""
    budget, block_size = limits.max_num_batched_tokens, limits.block_size
    most = limits.max_prefill_context(batch, shorter + 1)
    if batch > 1:
        most = min(most, max(0, (budget // batch - length) // block_size))
    elif length > round_up(budget, block_size):
        most = 0
    return most


def _every_context(limits: StepLimits, length: int) -> range:
    rest = max(0, limits.max_seq_len - length) if limits.has_context else 0
    return range(rest // limits.block_size + 1)


def linear_decode_buckets(settings: BucketSettings) -> list[Bucket]:
    """Return batch sizes x total block counts, each with at least one block for a sequence.

    Raises:
        ConfigError: the ranges contain no bucket.
    """
    batches = linear_range(*settings.decode_bs.as_tuple())
    counts = linear_range(*settings.decode_block.as_tuple())
    found = [decode(batch, count) for batch, count in product(batches, counts) if count >= batch]
    if not found:
        raise _no_buckets(settings.decode_bs, settings.decode_block, "block")
    return found


def _no_buckets(batch: BucketRange, size: BucketRange, label: str) -> ConfigError:
    return ConfigError(
        "No buckets could be captured with the following config (min, step, max_warmup): "
        f"bs:{batch}, {label}:{size}"
    )
