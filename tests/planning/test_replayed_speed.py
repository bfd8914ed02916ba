"""Test the figures of a replay, and the highest request rate that meets goals."""

import math

import numpy as np
import pytest

from tests.planning.test_replay import LIMITS, run, seconds, synthetic_trace
from tests.worker.hpu_helpers import make_config
from vllm.bucketing.catalog.bucket_plan import plan_buckets
from vllm.planning.replay import Replay, replay
from vllm.planning.replayed_speed import PERCENTILES, ReplaySpeed, highest_rate, tpot_s
from vllm.planning.request_lengths import RequestLengths
from vllm.planning.throughput.goals import Goals


def test_the_speed_is_that_of_the_times_of_the_requests() -> None:
    trace = synthetic_trace(40)
    found = run(make_config(**LIMITS), trace)
    speed = ReplaySpeed.of(found)
    assert found.num_outputs.tolist() == trace.num_outputs.tolist()
    assert speed.tokens_per_s == pytest.approx(trace.num_outputs.sum() / found.seconds)
    assert speed.requests_per_s == pytest.approx(trace.rate)
    waited = np.sort(found.first_tokens - found.arrivals)
    assert waited[0] <= speed.ttft_s[0] <= speed.ttft_s[1] <= speed.ttft_s[2] <= waited[-1]
    # A request takes the time from its first to its last output token: (number of output tokens -
    # 1) times the time per output token.
    several = found.num_outputs > 1
    lasted = tpot_s(found) * (found.num_outputs[several] - 1)
    assert found.first_tokens[several] + lasted == pytest.approx(found.ends[several])
    assert 0 < speed.mean_kv_usage < speed.max_kv_usage <= 1
    lines = list(speed.lines())
    assert [line.split()[0] for line in lines[3:]] == ["TTFT,", "TPOT,", "request,"]
    assert set(speed.as_json()["first_token_s"]) == {f"p{p}" for p in PERCENTILES}


def test_requests_of_one_token_have_no_time_per_output_token() -> None:
    found = run(make_config(**LIMITS), RequestLengths(np.array([5]), np.array([1]), None))
    speed = ReplaySpeed.of(found)
    assert (speed.requests_per_s, speed.tpot_s) == (None, ())
    assert "1 request all at once" in next(speed.lines())
    assert not any("TPOT" in line for line in speed.lines())


def test_a_small_cache_is_full_and_requests_are_preempted() -> None:
    config = make_config(**LIMITS)
    plan = plan_buckets(config, 20)
    requests = RequestLengths(np.full(6, 60), np.full(6, 60), None)
    speed = ReplaySpeed.of(replay(config, 20, plan, requests, seconds))
    assert speed.num_preemptions > 0
    assert speed.max_kv_usage > 0.9


def test_a_rate_stretches_the_times_or_draws_them() -> None:
    trace = synthetic_trace(40)
    assert trace.times is not None and trace.rate is not None
    twice = trace.at_rate(2 * trace.rate)
    assert twice.times == pytest.approx(trace.times / 2)
    drawn = RequestLengths(trace.num_inputs, trace.num_outputs, None).at_rate(5)
    assert drawn.times is not None and drawn.times[0] == 0
    assert drawn.rate == pytest.approx(5, rel=0.5)


class TestHighestRate:
    trace = synthetic_trace(40)

    def at(self, rate: float) -> Replay:
        return run(make_config(**LIMITS), self.trace.at_rate(rate))

    def test_a_higher_rate_misses_the_goals(self) -> None:
        goals = Goals(ttft_ms=120)
        found = highest_rate(self.at, goals, 1.0)
        assert found.misses == () and not found.is_highest_tried
        rate = found.speed.requests_per_s
        assert rate is not None and rate > 1
        assert found.speed.ttft_s[1] <= 0.12
        above = highest_rate(self.at, Goals(ttft_ms=240), 1.0).speed.requests_per_s
        assert above is not None and above > rate
        assert ReplaySpeed.of(self.at(1.1 * rate)).ttft_s[1] > 0.12
        assert next(found.lines()).startswith("Highest rate at which 90 % of the requests meet")

    def test_goals_that_nothing_meets_are_named_with_the_nearest(self) -> None:
        found = highest_rate(self.at, Goals(ttft_ms=1, tpot_ms=1e6), 1.0)
        [miss] = found.misses
        assert (miss.name, miss.goal) == ("ttft_ms", 1)
        assert "There is no rate at which 90 % of the requests" in next(found.lines())
        assert found.as_json()["is_met"] is False

    def test_goals_that_every_rate_meets_are_said_to_be(self) -> None:
        found = highest_rate(self.at, Goals(ttft_ms=1e9), 1.0)
        assert found.is_highest_tried and not found.misses
        assert found.speed.requests_per_s is not None
        assert math.isclose(found.speed.requests_per_s, 1e5)
