"""Test how the limits of a step shrink: only until the proof holds without the buckets that were
given up.
"""

import random

import pytest

from tests.bucketing.helpers import close
from tests.exhaustive import seeds
from vllm.bucketing import StepLimits
from vllm.bucketing.bucket import decode, prefill
from vllm.bucketing.catalog.catalog import Catalog
from vllm.bucketing.catalog.closure import prove
from vllm.bucketing.catalog.shrink import shrink_launches


def make_limits(**changes) -> StepLimits:
    limits = {"max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 64}
    more = {"block_size": 16, "num_blocks": 17, "max_block_refs": 16}
    return StepLimits(**limits | more | changes)


PROMPTS = [prefill(1, 16, 4), prefill(1, 32, 3), prefill(1, 64, 2)]
DECODES = [decode(1, 4), decode(2, 8), decode(4, 8), decode(4, 16)]


def shrink(limits: StepLimits, given_up: list) -> tuple[Catalog, StepLimits] | None:
    catalog = close(Catalog(PROMPTS, DECODES), limits)
    gone = [bucket for bucket in given_up if bucket in catalog]
    return shrink_launches(catalog.without(gone), limits, given_up)


def test_nothing_changes_while_every_step_has_its_buckets():
    catalog = Catalog(PROMPTS, [*DECODES, decode(4, 12)])
    limits = make_limits()
    assert shrink_launches(catalog, limits, [decode(4, 14)]) == (catalog, limits)


@pytest.mark.parametrize(
    ("given_up", "expected"),
    [
        ([prefill(1, 64, 2)], (32, 4, 16)),
        ([prefill(1, 64, 2), prefill(1, 32, 3)], (16, 4, 16)),
        ([decode(4, 16)], (64, 4, 8)),
        ([decode(4, 16), decode(4, 8)], (64, 4, 4)),
        ([decode(4, 16), decode(4, 8), decode(4, 4)], (64, 2, 8)),
        ([decode(4, 16), decode(4, 8), decode(4, 4), decode(2, 8), decode(2, 4)], (64, 1, 4)),
        ([prefill(1, 64, 2), decode(4, 16)], (32, 4, 8)),
    ],
)
def test_the_largest_launches_that_will_do_remain(given_up, expected):
    found = shrink(make_limits(), given_up)
    assert found is not None
    catalog, limits = found
    assert (limits.max_query_len, limits.max_decode_batch, limits.max_blocks) == expected
    assert prove(catalog, limits).is_covered


def test_parts_of_prompts_get_context_where_there_was_none():
    limits = make_limits(enable_chunked_prefill=False, enable_prefix_caching=False)
    catalog = close(Catalog([prefill(1, 64), prefill(1, 32)], DECODES), limits)
    found = shrink_launches(catalog.without([prefill(1, 64)]), limits, [prefill(1, 64)])
    assert found is not None
    catalog, limits = found
    assert limits.max_query_len == 32
    # A prompt of 64 tokens now runs as 32 tokens and then 32 more with the first 32 as context. The
    # same bucket serves shorter chunks with more context.
    assert prefill(1, 32, 4) in catalog.prefill
    assert prove(catalog, limits).is_covered


def test_the_cache_is_gathered_before_decodes_get_smaller():
    limits = make_limits(contiguous_pa=True, num_blocks=101)
    catalog = close(Catalog(PROMPTS, DECODES), limits)
    gone = [bucket for bucket in catalog.decode if bucket.blocks > 16]
    found = shrink_launches(catalog.without(gone), limits, gone)
    assert found is not None
    assert not found[1].contiguous_pa
    assert (found[1].max_decode_batch, found[1].max_blocks) == (4, 16)


@pytest.mark.parametrize(
    ("prompts", "decodes", "smallest"),
    [([], DECODES, prefill(1, 1)), (PROMPTS, [], decode(1, 1))],
)
def test_without_memory_for_any_launch_there_is_nothing_left(prompts, decodes, smallest):
    assert shrink_launches(Catalog(prompts, decodes), make_limits(), [smallest]) is None


@pytest.mark.parametrize("seed", seeds(15, 40))
def test_giving_up_what_is_too_large_ends_in_a_proof_or_in_nothing(seed):
    """Give up buckets one by one, for a device without memory for forward passes above some
    size.
    """
    rng = random.Random(seed)
    max_model_len, block = rng.randint(16, 96), rng.choice([4, 8, 16])
    num_blocks = 1 + -(-max_model_len // block) * rng.randint(1, 4)
    limits = StepLimits(
        max_num_seqs=rng.randint(1, 6),
        max_model_len=max_model_len,
        max_num_batched_tokens=max_model_len + rng.randint(0, 64),
        block_size=block,
        num_blocks=num_blocks,
        max_block_refs=num_blocks - 1,
        enable_chunked_prefill=rng.random() < 0.5,
        enable_prefix_caching=rng.random() < 0.5,
        contiguous_pa=rng.random() < 0.5,
    )
    memory = rng.randint(1, 300)

    def fits(bucket) -> bool:
        return bucket.num_tokens + bucket.blocks * bucket.batch <= memory

    catalog, given_up, tried = close(Catalog([], []), limits), [], set()
    while too_large := [b for b in (*catalog.prefill, *catalog.decode) if not fits(b)]:
        given_up.append(too_large[-1])
        assert given_up[-1] not in tried  # every bucket is given up once at most, so the loop ends
        tried.add(given_up[-1])
        found = shrink_launches(catalog.without(given_up[-1:]), limits, given_up)
        if found is None:
            break
        catalog, limits = found
    else:
        assert prove(catalog, limits).is_covered
        return
    smallest = max(limits.max_blocks_per_seq + 1, block + limits.max_context_blocks(1))
    assert memory < 2 * smallest + block
