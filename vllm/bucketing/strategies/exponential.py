"""Exponential bucketing: sizes at a constant ratio, as many as there would be powers of two.

Rounding to steps makes small sizes equal. Instead of dropping such a size, the nearest free
multiple of the step is used. So there are more small sizes, which most batches need.
"""

import math
from dataclasses import dataclass
from itertools import product

from vllm.bucketing.bucket import Bucket, decode, prefill
from vllm.bucketing.step_limits import StepLimits, round_up
from vllm.errors import ConfigError

LONG_CONTEXT_TOKENS = 8192
"""Prompts from here on get the upper half of their sizes evenly spaced."""

_ROUNDING = 1e-9
"""Relative error allowed to a power that should be an integer."""


@dataclass(frozen=True)
class ExponentialRange:
    """`limit` sizes from `min` to `max`, all multiples of `step`."""

    min: int
    step: int
    max: int
    limit: int

    def __str__(self) -> str:
        return f"[{self.min}, {self.step}, {self.max}, {self.limit}]"

    @classmethod
    def up_to(cls, min: int, step: int, max: int) -> "ExponentialRange":
        """Make a range with as many sizes as powers of two up to `max`."""
        return cls(min, step, max, num_powers(max))


@dataclass(frozen=True, kw_only=True)
class ExponentialSettings:
    """The four ranges of exponential bucketing, all derived from the limits of a step."""

    prompt_bs: ExponentialRange
    prompt_seq: ExponentialRange
    decode_bs: ExponentialRange
    decode_block: ExponentialRange

    @classmethod
    def derive(cls, limits: StepLimits, max_prefill_batch: int) -> "ExponentialSettings":
        """Derive the settings from the limits of a step.

        Args:
            limits: the longest query, the largest decode batch and its blocks.
            max_prefill_batch: largest number of prompts in one forward pass.
        """
        block, max_blocks = limits.block_size, limits.max_blocks
        longest = round_up(limits.max_query_len, block)
        count_step = min(block, max_blocks)
        return cls(
            prompt_bs=ExponentialRange.up_to(1, 2, max_prefill_batch),
            prompt_seq=ExponentialRange.up_to(block, block, longest),
            decode_bs=ExponentialRange.up_to(1, 2, limits.max_num_seqs),
            decode_block=ExponentialRange.up_to(count_step, count_step, max_blocks),
        )


def exponential_range(
    sizes: ExponentialRange,
    *,
    contiguous_pa: bool = False,
    long_context: bool = False,
    fill: bool = True,
) -> list[int]:
    """Return the sizes in ascending order.

    Args:
        sizes: min, step, max and the number of sizes.
        contiguous_pa: the last size is `max` exactly, not the next multiple of the step: it is
            the whole KV cache.
        long_context: half of the sizes grow linearly, so that large neighbours do not differ by
            tens of thousands of tokens.
        fill: replace a size that another one has taken by the nearest free one.

    >>> exponential_range(ExponentialRange(128, 128, 2048, 10))
    [128, 256, 384, 512, 640, 768, 896, 1152, 1536, 2048]

    Raises:
        ConfigError: `limit` is below 1.
    """
    low, step, high, limit = sizes.min, sizes.step, sizes.max, sizes.limit
    if limit < 1:
        raise ConfigError(f"num_buckets must be a positive integer, got {limit}")
    if limit == 1:
        return [high]
    num_powers = limit // 2 if long_context else limit
    top = max(low, high / limit) if long_context else high
    found: set[int] = set()
    for index in range(num_powers):
        exponent = index / (num_powers - 1) if num_powers > 1 else 0.0
        raw = low * (top / low) ** exponent
        is_last = index == limit - 1
        size = high if is_last and contiguous_pa else _next_multiple(raw, step)
        if size in found and fill:
            free = [value for value in range(low, high + 1, step) if value not in found]
            if not free:
                continue
            size = min(free, key=lambda value: abs(value - raw))
        found.add(size)
    num_even = limit - num_powers
    for index in range(1, num_even + 1):
        found.add(_next_multiple(top + index * (high - top) / num_even, step))
    return sorted(found)


def exponential_context(limits: StepLimits, query_len: int) -> list[int]:
    """Return context block counts for one padded length, from 0 to the most that fits, growing."""
    rest = max(0, limits.max_seq_len - query_len) // limits.block_size
    if not limits.has_context or rest == 0:
        return [0]
    count = num_powers(rest)
    return sorted({0} | {_next_multiple(rest ** (i / count), 1) for i in range(1, count + 1)})


def exponential_prefill_buckets(settings: ExponentialSettings, limits: StepLimits) -> list[Bucket]:
    """Return prefill buckets: all combinations of batch size, length and context block count."""
    batches = exponential_range(settings.prompt_bs, contiguous_pa=limits.contiguous_pa)
    lengths = exponential_range(
        settings.prompt_seq,
        contiguous_pa=limits.contiguous_pa,
        long_context=settings.prompt_seq.max >= LONG_CONTEXT_TOKENS,
    )
    return [
        prefill(batch, length, blocks)
        for batch, length in product(batches, lengths)
        for blocks in exponential_context(limits, length)
    ]


def exponential_decode_buckets(settings: ExponentialSettings, limits: StepLimits) -> list[Bucket]:
    """Return decode buckets: all combinations of batch size and block count.

    This includes fewer blocks than sequences: a batch between two batch sizes, with few blocks, is
    then padded only in sequences.
    """
    batches = exponential_range(settings.decode_bs, contiguous_pa=limits.contiguous_pa)
    counts = exponential_range(settings.decode_block, contiguous_pa=limits.contiguous_pa)
    return [decode(batch, count) for batch, count in product(batches, counts)]


def num_powers(largest: int) -> int:
    """Count the powers of two from 1 up to the first that is `largest` or more.

    >>> [num_powers(n) for n in (1, 2, 3, 256, 4127)]
    [1, 2, 3, 9, 14]
    """
    return (largest - 1).bit_length() + 1


def _next_multiple(value: float, step: int) -> int:
    """Round up; a power that misses an integer by a rounding error counts as that integer."""
    nearest = round(value)
    whole = nearest if abs(value - nearest) <= _ROUNDING * value else math.ceil(value)
    return round_up(whole, step)
