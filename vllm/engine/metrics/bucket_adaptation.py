"""Adapt the buckets of a running engine to its traffic (`--adapt-buckets`).

New buckets are chosen from the traffic so far, and tried on paper for the next hour: the cost that
they would have had for the traffic of this hour is compared with the real cost. If they would have
saved enough, the engine warms them up and uses them instead.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from vllm.bucketing.bucket import Bucket, Phase
from vllm.bucketing.catalog.bucket_plan import longest_prompt, traffic_step_limits
from vllm.bucketing.catalog.catalog import Catalog
from vllm.bucketing.catalog.from_traffic import bucket_cost, choose_for_traffic
from vllm.bucketing.traffic import TrafficTable
from vllm.config import VllmConfig
from vllm.cost_model.padded import forward_seconds
from vllm.engine.metrics.traffic_metrics import MIN_LAUNCHES, RecordedMetrics
from vllm.errors import EngineDeadError
from vllm.logger import init_logger
from vllm.utils.background_work import run_in_time_slices

logger = init_logger(__name__)

TRIAL_S = 3600.0
_CHECK_INTERVAL_S = 60.0
_MIN_GAIN = 0.03
_CHOOSING_S = 4.0

Replace = Callable[[Sequence[Sequence[int]]], Awaitable[bool]]
"""Begins to replace the buckets by these: phase, batch, query length and blocks of each. Returns
whether it has begun; see `CoreCalls.replace_buckets`."""


@dataclass(frozen=True)
class _Start:
    """Counters at the start of a period."""

    at_s: float
    traffic: TrafficTable
    needed_s: float
    padded_s: float


@dataclass(frozen=True)
class _Trial:
    """New buckets, and the period in which they are compared with the present ones."""

    buckets: tuple[Bucket, ...]
    start: _Start


class BucketAdaptation:
    """Replaces the buckets of an engine when other buckets would save device time.

    Args:
        metrics: metrics of the engine.
        config: config of the engine.
        replace: replaces the buckets of the engine.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        metrics: RecordedMetrics,
        config: VllmConfig,
        replace: Replace,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics, self._config = metrics, config
        self._replace, self._clock = replace, clock
        self._start: _Start | None = None
        """Start of the traffic for which buckets are chosen; None: the present buckets are not
        warm."""
        self._trial: _Trial | None = None

    async def run(self) -> None:
        """Check once a minute, until the task is cancelled."""
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            await self.look()

    async def look(self) -> None:
        """Begin a trial, end it, or keep waiting."""
        totals = self._metrics.totals
        is_warm = totals.warm_up.num_warm == totals.warm_up.num_wanted
        if not is_warm or not totals.num_kv_blocks:  # no blocks: the engine is restarting
            self._start = self._trial = None
            return
        if self._start is None:
            self._start = self._now()
        trial = self._trial
        if trial is None:
            traffic = self._traffic_since(self._start)
            if traffic.num_launches >= MIN_LAUNCHES:
                self._trial = await self._begin(traffic)
        elif self._clock() - trial.start.at_s >= TRIAL_S:
            self._trial = None
            self._start = trial.start  # the next buckets are chosen for the traffic of the trial
            await self._end(trial)

    def _now(self) -> _Start:
        return _Start(
            self._clock(), self._metrics.traffic_table.copy(), *self._metrics.device_seconds
        )

    def _traffic_since(self, start: _Start) -> TrafficTable:
        return self._metrics.traffic_table.since(start.traffic)

    async def _begin(self, traffic: TrafficTable) -> _Trial:
        """Begin a trial: choose buckets for the traffic so far. The traffic from now on decides
        about them.
        """
        start, num_blocks = self._now(), self._metrics.totals.num_kv_blocks + 1

        def choose() -> tuple[Bucket, ...]:
            chosen = choose_for_traffic(
                traffic,
                traffic_step_limits(self._config, num_blocks),
                self._config.hpu.num_buckets,
                longest_prompt=longest_prompt(self._config),
                max_seconds=_CHOOSING_S,
            )
            return chosen.buckets

        return _Trial(await asyncio.to_thread(run_in_time_slices, choose), start)

    async def _end(self, trial: _Trial) -> None:
        """End a trial: replace the buckets if the new ones would have saved enough."""
        traffic = self._traffic_since(trial.start)
        needed_s, padded_s = self._metrics.device_seconds
        needed_s, padded_s = needed_s - trial.start.needed_s, padded_s - trial.start.padded_s
        if traffic.num_launches < MIN_LAUNCHES or not needed_s:
            return
        gain = 1 - padded_seconds(trial.buckets, traffic, padded_s / needed_s) / padded_s
        if gain <= _MIN_GAIN:
            return
        try:
            has_begun = await self._replace(
                [(int(b.phase), b.batch, b.query_len, b.blocks) for b in trial.buckets]
            )
        except EngineDeadError:
            return  # the supervisor restarts the engine, or the server shuts down
        if has_begun:
            logger.info(
                "buckets: a new set of %d buckets would have saved %.1f %% of the device time of "
                "the last %.0f minutes. It is warmed up between steps and then replaces the "
                "current set",
                len(trial.buckets),
                *(100 * gain, (self._clock() - trial.start.at_s) / 60),
            )


def padded_seconds(buckets: Sequence[Bucket], traffic: TrafficTable, usual: float) -> float:
    """Return the predicted device seconds of a traffic that is padded to some buckets.

    Args:
        buckets: buckets of both phases.
        traffic: sizes before padding.
        usual: factor on the seconds of a forward pass that fits into none of these buckets, because
            it will run in a present bucket.
    """
    size = traffic.block_size
    catalog = Catalog(
        (b for b in buckets if b.phase is Phase.PREFILL),
        (b for b in buckets if b.phase is Phase.DECODE),
        bucket_cost(size),
    )
    total = 0.0
    for shape, count, _ in traffic:
        sizes = shape.batch, shape.query_len, shape.blocks
        padded = catalog.fit(shape.phase, *sizes)
        b = shape if padded is None else padded
        seconds = forward_seconds(b.phase, b.batch, b.query_len, b.blocks, size)
        total += count * seconds * (usual if padded is None else 1.0)
    return total
