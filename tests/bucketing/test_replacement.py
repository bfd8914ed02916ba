"""Test buckets that replace the buckets of a running engine: they cover all steps and are not
larger.
"""

import random
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.bucketing.test_closure import small_limits
from tests.bucketing.test_from_traffic import random_table
from vllm.bucketing.bucket import Phase, decode, prefill
from vllm.bucketing.catalog.catalog import Catalog
from vllm.bucketing.catalog.closure import prove, replacement
from vllm.bucketing.catalog.from_traffic import choose_for_traffic, traffic_limits
from vllm.bucketing.step_limits import StepLimits


def catalog_of(buckets) -> Catalog:
    return Catalog(
        (b for b in buckets if b.phase is Phase.PREFILL),
        (b for b in buckets if b.phase is Phase.DECODE),
    )


@given(limits=small_limits, seed=st.integers(0, 2**32), num_buckets=st.integers(1, 6))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_sets_for_another_traffic_are_closed(limits, seed, num_buckets) -> None:
    table = random_table(limits.block_size, seed)
    launch_limits = traffic_limits(table, replace(limits, max_block_refs=None))
    present = catalog_of(choose_for_traffic(table, limits, num_buckets).buckets)
    assert prove(present, launch_limits).is_covered
    rng = random.Random(seed)
    wanted = [
        *(decode(rng.randint(1, 8), rng.randint(1, 40), rng.choice([1, 3])) for _ in range(4)),
        *(prefill(rng.randint(1, 3), rng.randint(1, 20), rng.randint(0, 6)) for _ in range(4)),
    ]
    found = replacement(wanted, present, launch_limits)
    assert prove(catalog_of(found), launch_limits).is_covered
    held = (*present.prefill, *present.decode)
    assert all(any(other.covers(bucket) for other in held) for bucket in found)
    fitting = {b for b in wanted if any(other.covers(b) for other in held)}
    assert fitting <= set(found) <= fitting.union(held)
    kept = replacement(wanted, present, launch_limits, keeps_prompts=True)
    assert set(present.prefill) <= set(kept)


def test_only_what_closure_needs_stays_of_the_present_buckets() -> None:
    limits = StepLimits(
        max_num_seqs=4, max_model_len=64, max_num_batched_tokens=32, block_size=16, num_blocks=32
    )
    present = catalog_of(
        [
            *(prefill(batch, length, 4) for batch in (1, 2, 4) for length in (16, 32)),
            *(decode(batch, blocks) for batch in (1, 2, 4) for blocks in (4, 8, 16)),
        ]
    )
    found = replacement([decode(3, 12), decode(3, 99)], present, limits)
    assert found == [prefill(1, 32, 4), decode(3, 12), decode(4, 16)]
