"""Linear bucketing: few small sizes, doubling, then one every `step`.

ramp-up  min, 2*min, 4*min, ...   while below step: small batches waste little
stable   step, 2*step, ...        up to max
"""

from itertools import product

from vllm.bucketing.bucket import Bucket, decode, prefill
from vllm.bucketing.settings import BucketRange, BucketSettings
from vllm.bucketing.step_limits import StepLimits
from vllm.errors import ConfigError


def linear_range(min: int, step: int, max: int) -> list[int]:
    """Sizes from `min` to `max`, ascending. `max` itself is one only when a step lands on it.

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
            f"Min. batch size cannot be greater than max. batch size ({min} > {max}). If you want "
            f"to skip warmup, set VLLM_SKIP_WARMUP=true"
        )
    if min == 0:
        return [0] if max < step else [0, *linear_range(step, step, max)]
    sizes = []
    size = min
    while size < step and size <= max:
        sizes.append(size)
        size *= 2
    return sizes + [stable for stable in range(step, max + 1, step) if stable >= min]


def linear_prefill_buckets(settings: BucketSettings, limits: StepLimits) -> list[Bucket]:
    """Batch sizes x lengths x every number of context blocks a prompt of that length can have.

    Raises:
        ConfigError: the ranges hold nothing.
    """
    batches = linear_range(*settings.prompt_bs.as_tuple())
    lengths = linear_range(*settings.prompt_seq.as_tuple())
    if not batches or not lengths:
        raise _no_buckets(settings.prompt_bs, settings.prompt_seq, "seq")
    return [
        prefill(batch, length, blocks)
        for batch, length in product(batches, lengths)
        for blocks in linear_context(limits, length)
    ]


def linear_context(limits: StepLimits, query_len: int) -> range:
    """Context block counts for one padded length: what fits beside all of it."""
    rest = max(0, limits.max_seq_len - query_len) if limits.has_context else 0
    return range(rest // limits.block_size + 1)


def linear_decode_buckets(
    settings: BucketSettings,
    *,
    max_blocks: int | None = None,
    max_blocks_per_seq: int | None = None,
    append_max: bool = False,
) -> list[Bucket]:
    """Batch sizes x total block counts, without the impossible: a sequence has a block or more.

    Args:
        max_blocks: what a batch can ask for; larger counts shrink to it. None: no limit.
        max_blocks_per_seq: what one sequence can ask for; counts beyond all sequences of a batch
            shrink to what these can have. None: not considered.
        append_max: make `max_blocks` the end of the range, whatever the settings say.

    Raises:
        ConfigError: the ranges hold nothing.
    """
    batches = linear_range(*settings.decode_bs.as_tuple())
    block_range = settings.decode_block
    if append_max and max_blocks is not None:
        block_range = BucketRange(min(block_range.min, max_blocks), block_range.step, max_blocks)
    counts = linear_range(*block_range.as_tuple())
    if append_max and max_blocks is not None and max_blocks not in counts:
        counts.append(max_blocks)
    found: dict[Bucket, None] = {}
    for batch, count in product(batches, counts):
        if batch > count:
            continue
        blocks = count if max_blocks is None else min(count, max_blocks)
        if max_blocks_per_seq is not None:
            blocks = min(blocks, batch * max_blocks_per_seq)
        found[decode(batch, blocks)] = None
    if not found:
        raise _no_buckets(settings.decode_bs, settings.decode_block, "block")
    return list(found)


def _no_buckets(batch: BucketRange, size: BucketRange, label: str) -> ConfigError:
    return ConfigError(
        f"No buckets could be captured with following config (min, step, max_warmup): "
        f"bs:{batch}, {label}:{size}"
    )
