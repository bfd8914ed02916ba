"""Test which buckets a start compiles first and in which order the others follow, for random
engines.
"""

import random

import pytest

from tests.bucketing.helpers import make_limits
from tests.worker.hpu_helpers import make_config, random_plan
from vllm.bucketing import Phase
from vllm.bucketing.bucket import decode, prefill
from vllm.bucketing.catalog.bucket_plan import plan_buckets
from vllm.bucketing.catalog.catalog import Catalog
from vllm.bucketing.catalog.closure import prove
from vllm.bucketing.catalog.first_set import (
    choose_first,
    even_shapes,
    mandatory_buckets,
    savings,
)
from vllm.bucketing.traffic import TrafficTable, even_traffic
from vllm.cost_model.padded import forward_seconds
from vllm.worker.hpu.launches.planner import launch_shapes
from vllm.worker.hpu.memory.memory_forecast import MemoryForecast


def test_what_is_warm_is_closed_at_each_moment_and_the_largest_come_first(tmp_path):
    rng = random.Random(7)
    sizes = MemoryForecast(block_size=4).memory_sizes
    num_smaller = 0
    for _ in range(60):
        _, _, plan = random_plan(rng, tmp_path)
        wanted, limits, most = plan.catalog, plan.limits, rng.randint(1, 6)
        traffic = even_traffic(limits)
        first = choose_first(wanted, limits, most, traffic, forward_seconds, memory_sizes=sizes)
        warm = Catalog((), ()).with_buckets(first)
        assert prove(warm, limits).is_covered
        for phase, all_of_phase in ((Phase.PREFILL, wanted.prefill), (Phase.DECODE, wanted.decode)):
            chosen = [bucket for bucket in first if bucket.phase is phase]
            least = mandatory_buckets(all_of_phase, limits, sizes)
            assert set(least) <= set(chosen) and len(chosen) <= max(most, len(least))
            for size in sizes:
                assert max(map(size, all_of_phase)) <= max(map(size, chosen))
        rest = [b for b in (*wanted.prefill, *wanted.decode) if b not in warm]
        num_smaller += bool(rest)
        while rest:
            saved = savings(rest, warm, even_shapes(limits), forward_seconds)
            warm = warm.with_buckets([rest.pop(saved.index(max(saved)))])
            assert prove(warm, limits).is_covered
        assert {*wanted.prefill, *wanted.decode} <= {*warm.prefill, *warm.decode}
    assert num_smaller > 30


@pytest.fixture(scope="module")
def usual():
    """Return the plan of Llama-3.1-8B on a Gaudi 2 with the defaults."""
    config = make_config(
        block_size=128,
        max_model_len=8192,
        max_num_seqs=128,
        max_num_batched_tokens=8192,
        contiguous_pa=True,
    )
    return plan_buckets(config, 4107)


def test_the_smallest_set_of_a_usual_server_is_two_buckets(usual):
    catalog, limits = usual.catalog, usual.limits
    assert mandatory_buckets(catalog.prefill, limits) == [prefill(1, 1024, 64)]
    assert mandatory_buckets(catalog.decode, limits) == [decode(128, 4107)]


NUM_LAYERS = 32
COMPILE_BF16_S, COMPILE_FP8_S, CAPTURE_S = 0.012 * NUM_LAYERS, 0.22 * NUM_LAYERS, 0.33
"""Seconds of a padded shape of Llama-3.1-8B, by published logs; see `warmup_estimate`."""


def test_a_usual_server_is_ready_in_a_minute_and_in_fp8_in_six(usual):
    catalog, limits = usual.catalog, usual.limits
    first = choose_first(catalog, limits, 8, even_traffic(limits), forward_seconds)
    assert len(first) == 16

    def seconds(buckets, compile_s):
        num_shapes = sum(len(launch_shapes(bucket, limits)) for bucket in buckets)
        return num_shapes * (compile_s + CAPTURE_S)

    every = (*catalog.prefill, *catalog.decode)
    assert seconds(first, COMPILE_BF16_S) < 60 < seconds(every, COMPILE_BF16_S)
    assert seconds(first, COMPILE_FP8_S) < 360 < seconds(every, COMPILE_FP8_S) / 5


def test_buckets_of_recipes_on_disk_are_preferred():
    limits = make_limits(max_num_seqs=64)
    wanted = Catalog(
        [prefill(1, n * 128) for n in range(1, 17)],
        [decode(64, n * 64) for n in range(1, 17)],
    )
    traffic = even_traffic(limits)
    liked = {prefill(1, 384), prefill(1, 1152), decode(64, 192)}
    plain = choose_first(wanted, limits, 3, traffic, forward_seconds)
    found = choose_first(wanted, limits, 3, traffic, forward_seconds, preferred=liked)
    assert not liked <= set(plain) and liked <= set(found) and len(found) == len(plain) == 6


@pytest.mark.parametrize("phase", list(Phase))
def test_the_bucket_that_the_traffic_needs_most_saves_most(phase):
    wide = prefill(4, 1024) if phase is Phase.PREFILL else decode(64, 1024)
    small = prefill(1, 128) if phase is Phase.PREFILL else decode(8, 64)
    middle = prefill(2, 512) if phase is Phase.PREFILL else decode(32, 256)
    both = Catalog(
        [wide if phase is Phase.PREFILL else prefill(4, 1024)],
        [wide if phase is Phase.DECODE else decode(64, 1024)],
    )
    for often, other in ((small, middle), (middle, small)):
        traffic = TrafficTable(128)
        traffic.add(phase, often.batch, often.query_len, often.blocks, count=1000)
        traffic.add(phase, other.batch, other.query_len, other.blocks)
        demand = [traffic.shapes(each) for each in Phase]
        saved = dict(
            zip(
                (small, middle),
                savings([small, middle], both, demand, forward_seconds),
                strict=True,
            )
        )
        if often is middle:
            assert saved[middle] > saved[small]
        else:
            assert saved[small] > saved[middle]
