"""Linear bucketing: few small sizes, doubling, then one every `step`.

ramp-up  min, 2*min, 4*min, ...   while below step: small batches waste little
stable   step, 2*step, ...        up to max
"""

from collections.abc import Sequence
from itertools import pairwise, product

from vllm.bucketing.bucket import Bucket, decode, prefill
from vllm.bucketing.settings import BucketRange, BucketSettings, check_combinations, check_num_steps
from vllm.bucketing.step_limits import StepLimits, ceil_div, round_up
from vllm.errors import ConfigError

_FINE_CONTEXT = (1024, 4096)
"""Tokens of context of a single prompt, below the counts that double."""


def linear_range(min: int, step: int, max: int) -> list[int]:
    """Return sizes from `min` to `max`, ascending; `max` itself only if a step reaches it.

    A `min` of 0 means "none", and is followed by the range from `step` on.

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
    return sizes + list(range(round_up(min, step), max + 1, step))


def linear_prefill_buckets(settings: BucketSettings, limits: StepLimits) -> list[Bucket]:
    """Return prefill buckets: combinations of batch size, length and context block count.

    See `linear_context`. Batches with context have lengths that at least double: prompts of a step
    with very different lengths run in separate forward passes, which costs little. For sequences of
    more than `max_fine_len` tokens there are only a few buckets of single prompts: see
    `_long_buckets`.

    Args:
        settings: the ranges.
        limits: limits of a forward pass.

    Raises:
        ConfigError: the ranges contain no size.
    """
    batches = _sizes("PROMPT_BS", settings.prompt_bs)
    lengths = _sizes("PROMPT_SEQ", settings.prompt_seq)
    if not batches or not lengths:
        empty = settings.prompt_seq if batches else settings.prompt_bs
        name = f"VLLM_PROMPT_{'SEQ' if batches else 'BS'}_BUCKET"
        raise _no_buckets(
            settings.prompt_bs,
            settings.prompt_seq,
            "seq",
            f"Sizes from a step on are multiples of it, and no multiple of {empty.step} is from "
            f"{empty.min} to {empty.max}: raise {name}_MAX, or lower {name}_STEP or {name}_MIN",
        )
    check_combinations("PROMPT", len(batches), len(lengths))
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
    """Return context block counts of a prefill bucket: 0, `_FINE_CONTEXT`, doubling, the largest.

    Doubling ends at sequences of `max_fine_len` tokens, and the largest is left out if the previous
    count is nearly as large. In a batch there are only 0 and the largest.

    The largest is the context that the shortest prompt padded to `length` can have, so that each
    has a bucket; in a batch it is also limited by the token budget. A bucket that exceeds the
    budget without any context (`vllm.bucketing.step_limits`) gets none.

    The fork has every count (0, 1, 2, 3, ...): hundreds to thousands of prompt buckets, each of
    which is compiled and may need a graph. A block of context costs a token of a prompt 1/256 of
    its linear layers (`padded_cost`), so up to 8 blocks instead of 1 cost 3 %, and up to 32 instead
    of 9 cost 9 %. benchmarks/history.md has the counts and the padding.

    Args:
        limits: limits of a forward pass.
        batch: prompts of the bucket.
        shorter: the next smaller length, 0 for the smallest.
        length: length of the bucket.
        max_fine_len: tokens of context and prompt together.
    """
    most = _max_context(limits, batch, shorter, length)
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

    Nearly all work of a long prompt is in chunks of the longest length, so this length has context
    counts that double. Shorter lengths occur only at the end of a prompt: their lengths at least
    double, and their context counts grow four times.
    """
    doubling = _doubling(lengths)
    found = []
    for shorter, length in pairwise([0, *doubling]):
        most = _max_context(limits, batch, shorter, length)
        factor = 2 if length == doubling[-1] else 4
        blocks = factor * ceil_div(max_fine_len, limits.block_size)
        while blocks < most:
            found.append(prefill(batch, length, blocks))
            blocks *= factor
        found.append(prefill(batch, length, most))
    return found


def _doubling(lengths: Sequence[int]) -> list[int]:
    """Return the largest length, and shorter ones that are at most half of the next one each."""
    doubling = [lengths[-1]]
    for length in reversed(lengths):
        if 2 * length <= doubling[0]:
            doubling.insert(0, length)
    return doubling


def _max_context(limits: StepLimits, batch: int, shorter: int, length: int) -> int:
    """Return the largest context of prompts longer than `shorter`, in blocks."""
    budget, block_size = limits.max_num_batched_tokens, limits.block_size
    most = limits.max_prefill_context(batch, shorter + 1)
    if batch > 1:
        most = min(most, max(0, (budget // batch - length) // block_size))
    elif length > round_up(budget, block_size):
        most = 0
    return most


def linear_decode_buckets(settings: BucketSettings) -> list[Bucket]:
    """Return decode buckets: batch sizes with total block counts, a block or more per sequence.

    Raises:
        ConfigError: the ranges contain no bucket.
    """
    batches = _sizes("DECODE_BS", settings.decode_bs)
    counts = _sizes("DECODE_BLOCK", settings.decode_block)
    check_combinations("DECODE", len(batches), len(counts))
    found = [decode(batch, count) for batch, count in product(batches, counts) if count >= batch]
    if not found:
        raise _no_buckets(
            settings.decode_bs,
            settings.decode_block,
            "block",
            "Each request of a decode needs at least one KV block, so that a batch needs as many "
            "blocks as it has requests: raise VLLM_DECODE_BLOCK_BUCKET_MAX, or lower "
            "VLLM_DECODE_BS_BUCKET_MIN",
        )
    return found


def _sizes(key: str, sizes: BucketRange) -> list[int]:
    check_num_steps(key, *sizes.as_tuple())
    return linear_range(*sizes.as_tuple())


def _no_buckets(batch: BucketRange, size: BucketRange, label: str, advice: str) -> ConfigError:
    return ConfigError(
        "No buckets could be captured with the following config (min, step, max_warmup): "
        f"bs:{batch}, {label}:{size}. {advice}"
    )
