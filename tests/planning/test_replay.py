"""Test replaying the requests of a trace with the scheduler and the planner."""

import random

import numpy as np
import pytest

from tests.worker.hpu_helpers import make_config
from vllm.bucketing import Phase
from vllm.bucketing.bucket import Bucket
from vllm.bucketing.catalog.bucket_plan import plan_buckets, step_limits
from vllm.bucketing.catalog.from_traffic import choose_for_traffic
from vllm.config import VllmConfig
from vllm.planning.replay import Replay, replay
from vllm.planning.request_lengths import RequestLengths

LIMITS = {"block_size": 16, "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 256}
NUM_BLOCKS = 129


def seconds(bucket: Bucket) -> float:
    if bucket.phase is Phase.DECODE:
        return 0.01 + 0.001 * bucket.blocks + 0.0005 * bucket.num_tokens
    return 0.01 + 0.0001 * bucket.num_tokens * (1 + bucket.blocks / 100)


def synthetic_trace(count: int, seed: int = 0) -> RequestLengths:
    rng = random.Random(seed)
    inputs = np.array([round(40 * rng.lognormvariate(0, 0.6)) + 1 for _ in range(count)])
    outputs = np.array([rng.randint(1, 30) for _ in range(count)])
    times = np.cumsum([rng.expovariate(8) for _ in range(count)])
    return RequestLengths(inputs, outputs, times)


def run(config: VllmConfig, requests: RequestLengths, rate: float = 1.0) -> Replay:
    plan = plan_buckets(config, NUM_BLOCKS)
    return replay(config, NUM_BLOCKS, plan, requests, seconds, rate=rate)


def test_every_request_gets_its_tokens_in_its_time() -> None:
    requests = synthetic_trace(40)
    assert requests.times is not None
    found = run(make_config(**LIMITS), requests)
    assert (found.first_tokens >= found.arrivals).all()
    assert (found.ends >= found.first_tokens).all()
    assert found.seconds == found.ends.max()
    decode, prompts = found.by_phase[Phase.DECODE], found.by_phase[Phase.PREFILL]
    assert decode.needed_tokens == (requests.num_outputs - 1).sum()
    assert prompts.needed_tokens == requests.num_inputs.sum()
    assert decode.padded_s >= decode.needed_s
    assert found.table.num_launches >= found.num_steps


def test_a_higher_rate_makes_larger_batches() -> None:
    config, requests = make_config(**LIMITS), synthetic_trace(40)

    def mean_batch(rate: float) -> float:
        shapes, weights = run(config, requests, rate).table.shapes(Phase.DECODE)
        return float(np.average(shapes[:, 1], weights=weights))

    assert mean_batch(10) > mean_batch(1)


def test_requests_that_are_too_long_are_cut_and_those_without_times_come_at_once() -> None:
    requests = RequestLengths(np.array([10_000, 5]), np.array([10_000, 0]), None)
    found = run(make_config(**LIMITS), requests)
    assert found.arrivals.tolist() == [0, 0]
    assert np.isfinite(found.ends).all()


def test_chosen_buckets_pad_less_on_a_held_out_half_than_as_many_of_the_default() -> None:
    first, second = synthetic_trace(60, 1), synthetic_trace(60, 2)
    config = make_config(**LIMITS)
    recorded = run(config, first)
    limits = step_limits(config, NUM_BLOCKS)
    chosen = choose_for_traffic(recorded.table, limits, 12)
    buckets = tuple((int(b.phase), b.batch, b.query_len, b.blocks) for b in chosen.buckets)
    found = run(make_config(**LIMITS, bucketing_strategy="optimal", chosen_buckets=buckets), second)
    default = run(config, second)
    assert found.padding < default.padding
    assert chosen.padding == pytest.approx(found.padding, abs=0.2)
