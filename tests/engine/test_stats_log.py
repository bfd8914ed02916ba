"""Test the line of statistics in the log, word for word."""

import asyncio

import pytest

from tests.engine.fakes import make_config
from tests.hpu import captured_log
from vllm.engine.metrics.engine_metrics import EngineMetrics, IterationStats
from vllm.engine.metrics.stats_log import StatsLog
from vllm.messages import SchedulerStats

BUSY = SchedulerStats(
    num_running=4,
    num_waiting=2,
    kv_cache_usage=0.123,
    num_prefix_queries=200,
    num_prefix_hits=50,
)


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics("stdlib", make_config())


def test_rates_are_those_since_the_line_before(metrics):
    now = 0.0
    log = StatsLog(metrics, clock=lambda: now)
    with captured_log() as lines:
        for _ in range(2):
            now += 10
            metrics.record_output(BUSY, IterationStats(100, 25, [], []))
            log.log()
    assert lines == 2 * [
        "Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 2.5 tokens/s, "
        "Running: 4 reqs, Waiting: 2 reqs, GPU KV cache usage: 12.3%, Prefix cache hit rate: 25.0%"
    ]


@pytest.mark.parametrize(
    ("stats", "tokens", "num_lines"),
    [
        (SchedulerStats(), 0, 0),
        (SchedulerStats(), 1, 1),
        (SchedulerStats(num_running=1), 0, 1),
        (SchedulerStats(num_waiting=1), 0, 1),
    ],
)
def test_an_idle_engine_is_not_mentioned(metrics, stats, tokens, num_lines):
    log = StatsLog(metrics)
    metrics.record_output(stats, IterationStats(0, tokens, [], []))
    with captured_log() as lines:
        log.log()
    assert len(lines) == num_lines


def test_it_goes_on_until_it_is_cancelled(metrics):
    async def run() -> None:
        metrics.record_output(BUSY, IterationStats(1, 1, [], []))
        task = asyncio.create_task(StatsLog(metrics).run(interval_s=0.001))
        while len(lines) < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with captured_log() as lines:
        asyncio.run(asyncio.wait_for(run(), 30))
