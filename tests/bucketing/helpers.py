"""Builders that the bucketing tests share, and the buckets of published logs."""

from typing import Any

from vllm.bucketing.bucket import Bucket, decode, prefill
from vllm.bucketing.catalog.catalog import Catalog
from vllm.bucketing.catalog.closure import missing_buckets
from vllm.bucketing.settings import BucketRange, BucketSettings
from vllm.bucketing.step_limits import StepLimits

GIB = 1 << 30
MIB = 1 << 20

SEED_PROMPTS = [prefill(batch, seq) for batch in (1, 2, 4) for seq in range(128, 1025, 128)]
# In the seeds' list of buckets, a decode bucket has the length of one sequence; here it has the
# number of blocks of the whole batch.
SEED_DECODES = [decode(batch, seq) for batch in (1, 2, 4) for seq in range(128, 2049, 128)]


def close(catalog: Catalog, limits: StepLimits) -> Catalog:
    """Return the catalog with the buckets that the proof still needs."""
    return catalog.with_buckets(missing_buckets(catalog, limits))


def make_limits(**changes: Any) -> StepLimits:
    """Return the limits of the published example: four sequences, whole prompts."""
    defaults: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_model_len": 2048,
        "max_num_batched_tokens": 8192,
        "block_size": 128,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
    }
    return StepLimits(**{**defaults, **changes})


def make_settings(
    prompt_bs: tuple[int, int, int] = (1, 32, 4),
    prompt_seq: tuple[int, int, int] = (128, 128, 1024),
    decode_bs: tuple[int, int, int] = (1, 128, 4),
    decode_block: tuple[int, int, int] = (128, 128, 2048),
) -> BucketSettings:
    """Return the bucket ranges of the published log."""
    return BucketSettings(
        prompt_bs=BucketRange(*prompt_bs),
        prompt_seq=BucketRange(*prompt_seq),
        decode_bs=BucketRange(*decode_bs),
        decode_block=BucketRange(*decode_block),
    )


def triples(buckets: Any) -> list[tuple[int, int, int]]:
    """Return (batch, query_len, blocks) of each bucket."""
    return [(b.batch, b.query_len, b.blocks) for b in buckets]


def pairs(buckets: list[Bucket]) -> list[tuple[int, int]]:
    """Return (batch, blocks) of each decode bucket."""
    return [(b.batch, b.blocks) for b in buckets]
