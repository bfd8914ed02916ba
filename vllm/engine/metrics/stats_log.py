"""Log a line of statistics every ten seconds while requests run."""

import asyncio
import time
from collections.abc import Callable

from vllm.engine.metrics.replica_metrics import ReadableMetrics
from vllm.logger import init_logger

logger = init_logger(__name__)

INTERVAL_S = 10.0


class StatsLog:
    """Logs statistics since the previous line, unless the engine was idle.

    Args:
        metrics: metrics of the engine.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, metrics: ReadableMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._remember()

    async def run(self, interval_s: float = INTERVAL_S) -> None:
        """Log a line at each interval, until the task is cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            self.log()

    def log(self) -> None:
        """Log the statistics since the last call."""
        metrics, stats = self._metrics, self._metrics.totals
        seconds = max(self._clock() - self._time, 1e-9)
        num_prompt = metrics.num_prompt_tokens - self._num_prompt_tokens
        num_generated = metrics.num_generation_tokens - self._num_generation_tokens
        self._remember()
        if not (num_prompt or num_generated or stats.num_running or stats.num_waiting):
            return
        hit_rate = stats.num_prefix_hits / max(stats.num_prefix_queries, 1)
        logger.info(
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, "
            "Running: %d reqs, Waiting: %d reqs, GPU KV cache usage: %.1f%%, "
            "Prefix cache hit rate: %.1f%%",
            num_prompt / seconds,
            num_generated / seconds,
            stats.num_running,
            stats.num_waiting,
            100 * stats.kv_cache_usage,
            100 * hit_rate,
        )

    def _remember(self) -> None:
        self._time = self._clock()
        self._num_prompt_tokens = self._metrics.num_prompt_tokens
        self._num_generation_tokens = self._metrics.num_generation_tokens
