"""Padding-aware bucketing: linear sizes, from which sizes are dropped within a bound on padding.

A size is dropped if padding its batches to the next size adds at most `pad_percent` percent and at
most `pad_max`. Small sizes double, as in linear bucketing.

    VLLM_PROMPT_BS_BUCKET_*      prompts of a batch            1, 1, 1
    VLLM_PROMPT_SEQ_BUCKET_*     tokens of the longest         block_size, block_size, longest chunk
    VLLM_PROMPT_CTX_BUCKET_*     its blocks of context         0, 2, the most there can be
    VLLM_DECODE_BS_BUCKET_*      sequences of a batch          1, 2, max_num_seqs
    VLLM_DECODE_BLOCK_BUCKET_*   their blocks together         block_size, block_size,
                                                               max_num_seqs * blocks of the longest

Each has two more variables, _PAD_MAX (default: a quarter of MAX) and _PAD_PERCENT (default: 25). As
in the other strategies, a larger MAX than a step can need is lowered to what it can need.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, product

from vllm.bucketing.bucket import Bucket, decode, prefill
from vllm.bucketing.settings import BucketRange, check_combinations, check_num_steps, resolve_range
from vllm.bucketing.step_limits import StepLimits, ceil_div, round_up
from vllm.errors import ConfigError

DEFAULT_PAD_PERCENT = 25
_MAX_STEPS = 5_000_000
"""Most steps that are looked at, which takes a second or two. Only a few of them become sizes."""
MAX_PAD_PERCENT = 50
"""Doubling pads by 50 percent, so a larger bound would change nothing."""


@dataclass(frozen=True)
class PaddedRange:
    """Sizes of one dimension with a bound on padding."""

    min: int
    step: int
    max: int
    pad_max: int
    """Maximum padding; 0: only `pad_percent` limits it."""
    pad_percent: int
    """Most padding, in percent of the padded size."""

    def __str__(self) -> str:
        return f"[{self.min}, {self.step}, {self.max}, {self.pad_max}, {self.pad_percent}]"


@dataclass(frozen=True, kw_only=True)
class PaddingAwareSettings:
    """The five ranges of padding-aware bucketing."""

    prompt_bs: PaddedRange
    prompt_seq: PaddedRange
    prompt_ctx: PaddedRange
    decode_bs: PaddedRange
    decode_block: PaddedRange

    @classmethod
    def resolve(cls, limits: StepLimits, given: Mapping[str, int]) -> "PaddingAwareSettings":
        """Return the ranges from the variables that are set, by name, and defaults.

        Raises:
            ConfigError: a minimum is above its maximum, a step is below 1, or a bound on padding
                is not accepted.
        """
        block, seqs = limits.block_size, limits.max_num_seqs
        longest = round_up(limits.max_query_len, block)
        context = limits.max_context_blocks(1)
        budget = ceil_div(limits.max_num_batched_tokens, block)
        blocks = max(block, seqs * limits.max_blocks_per_seq)
        ranges = {
            "PROMPT_BS": (BucketRange(1, 1, 1), None),
            "PROMPT_SEQ": (BucketRange(min(block, longest), block, longest), None),
            "PROMPT_CTX": (BucketRange(0, 2, context), budget),
            "DECODE_BS": (BucketRange(1, 2, seqs), None),
            "DECODE_BLOCK": (BucketRange(block, block, blocks), None),
        }
        found = {
            key.lower(): _padded(key, resolve_range(key, default, given), pad_max, given)
            for key, (default, pad_max) in ranges.items()
        }
        return cls(**found)


def padded_range(sizes: PaddedRange) -> list[int]:
    """Return the sizes in ascending order.

    >>> padded_range(PaddedRange(1, 2, 16, 4, 25))
    [1, 2, 4, 6, 8, 12, 16]
    >>> padded_range(PaddedRange(0, 8, 64, 64, 50))
    [0, 1, 2, 4, 8, 16, 32, 64]
    """
    pad_max = sizes.pad_max or sizes.max
    found = [sizes.min]
    size = sizes.min
    while size <= sizes.max:
        if size <= sizes.step:
            size = 2 * found[-1] or 1
            if size <= sizes.max:
                found.append(size)
            continue
        following = size + sizes.step
        padding = following - found[-1] - 1
        is_needed = (
            100 * padding > sizes.pad_percent * following
            or padding > pad_max
            or size % pad_max == 0
        )
        if is_needed and size != found[-1]:
            found.append(size)
        size = following
    return found if found[-1] == sizes.max else [*found, sizes.max]


def padding_aware_prefill_buckets(
    settings: PaddingAwareSettings, limits: StepLimits
) -> list[Bucket]:
    """Return prefill buckets, sorted: combinations of batch size, length and context blocks.

    The largest context differs by length: it is the context that the shortest prompt padded to this
    length can have.
    """
    batches, lengths = padded_range(settings.prompt_bs), padded_range(settings.prompt_seq)
    contexts = padded_range(settings.prompt_ctx)
    num_contexts = min(len(contexts), limits.max_context_blocks(1) + 1)
    check_combinations("PROMPT", len(batches), len(lengths), num_contexts)
    buckets: set[Bucket] = set()
    for batch, (shorter, length) in product(batches, pairwise([0, *lengths])):
        most = limits.max_prefill_context(batch, shorter + 1)
        counts = {most, *(blocks for blocks in contexts if blocks < most)}
        buckets.update(prefill(batch, length, blocks) for blocks in counts)
    return sorted(buckets)


def padding_aware_decode_buckets(settings: PaddingAwareSettings) -> list[Bucket]:
    """Return decode buckets, sorted: batch sizes with a block or more per sequence."""
    batches, counts = padded_range(settings.decode_bs), padded_range(settings.decode_block)
    check_combinations("DECODE", len(batches), len(counts))
    pairs = product(batches, counts)
    return sorted(decode(batch, blocks) for batch, blocks in pairs if blocks >= batch)


def _padded(
    key: str, sizes: BucketRange, pad_max: int | None, given: Mapping[str, int]
) -> PaddedRange:
    names = [f"VLLM_{key}_BUCKET_{part}" for part in ("PAD_MAX", "PAD_PERCENT")]
    most, percent = given.get(names[0], pad_max), given.get(names[1], DEFAULT_PAD_PERCENT)
    if most is None:
        most = ceil_div(sizes.max, 4)
    if most < 0:
        raise ConfigError(f"{names[0]}={most} must be at least 0 (0: no limit)")
    if not 0 <= percent <= MAX_PAD_PERCENT:
        raise ConfigError(f"{names[1]}={percent} must be 0 to {MAX_PAD_PERCENT} percent")
    check_num_steps(key, *sizes.as_tuple(), _MAX_STEPS)
    return PaddedRange(sizes.min, sizes.step, sizes.max, most, percent)
