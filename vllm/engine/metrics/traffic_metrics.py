"""Record the sizes that forward passes needed, as metrics, as a table and in a file.

Nothing is recorded on a device without padded sizes.
"""

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from vllm.bucketing.bucket import Phase
from vllm.bucketing.catalog.bucket_plan import longest_prompt, traffic_step_limits
from vllm.bucketing.catalog.from_traffic import choose_for_traffic
from vllm.bucketing.traffic import Shapes, TrafficTable, rounded_sizes
from vllm.config import VllmConfig
from vllm.cost_model.padded import forward_seconds
from vllm.cost_model.run_times import (
    FIELD,
    BucketTimes,
    RunEngine,
    RunTimes,
    add_times,
    parse_run_times,
)
from vllm.engine.metrics.registry import MetricSet
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.messages import LAUNCH_FIELDS, RunnerStats, SchedulerStats
from vllm.utils.background_work import start_in_time_slices

logger = init_logger(__name__)

WRITE_INTERVAL_S = 60.0
_CHECK_INTERVAL_S = 600.0
_DAY_S = 86_400.0
_POOR_PADDING = 0.05
"""Fraction of the device time above which other buckets are looked for."""
_MIN_GAIN = 0.03
MIN_LAUNCHES = 10_000
"""Forward passes for which buckets are chosen."""
_CHOOSING_S = 4.0
_MAX_COLLECTED = 512 * LAUNCH_FIELDS
_POWERS = tuple(2**power for power in range(18))


class TrafficMetrics:
    """Counts the forward passes of one replica, by size.

    Forward passes are collected as they are reported. They are added to the table, the histograms
    and the seconds when these are read, or when there are many.

    Args:
        metrics: set to which the histograms are added.
        block_size: tokens per KV block.
    """

    def __init__(self, metrics: MetricSet, block_size: int) -> None:
        self._table = TrafficTable(block_size)
        self._times: BucketTimes = {}
        self._needed_s = self._padded_s = 0.0
        self._num_seen = 0
        self._collected: list[int] = []
        """`LAUNCH_FIELDS` values of each forward pass."""
        batch, query_len, blocks = (
            metrics.histograms(f"vllm:forward_pass_{name}", help, _POWERS, "phase")
            for name, help in (
                ("batch", "Number of requests in a forward pass, without padding."),
                (
                    "query_tokens",
                    "Largest number of new tokens of one request in a forward pass, without "
                    "padding.",
                ),
                ("kv_blocks", "Number of KV blocks in a forward pass, without padding."),
            )
        )
        self._histograms = [
            [histogram.cell(str(phase)) for histogram in (batch, query_len, blocks)]
            for phase in Phase
        ]

    @property
    def table(self) -> TrafficTable:
        """Counts by size."""
        self.add_up()
        return self._table

    @property
    def times(self) -> BucketTimes:
        """Measured seconds by bucket."""
        self.add_up()
        return self._times

    @property
    def device_seconds(self) -> tuple[float, float]:
        """Predicted seconds of all forward passes, without padding and with it."""
        self.add_up()
        return self._needed_s, self._padded_s

    @property
    def padding(self) -> float | None:
        """Predicted fraction of the device time that is padding; None before anything has run."""
        needed_s, padded_s = self.device_seconds
        return 1 - needed_s / padded_s if padded_s else None

    def count(self, runner: RunnerStats) -> None:
        """Count the forward passes since the last call.

        Args:
            runner: latest statistics of a worker.
        """
        recent = runner.recent_launches
        if not recent or recent[0] == self._num_seen:
            return
        num_launches, num_listed = recent[0], len(recent) // LAUNCH_FIELDS
        if num_launches < self._num_seen:  # the count starts again in a restarted process
            self._num_seen = 0
        num_new = num_launches - self._num_seen
        self._num_seen = num_launches
        if num_new > num_listed:  # some launches were dropped before their statistics were read
            self._table.num_forgotten += num_new - num_listed
            num_new = num_listed
        self._collected += recent[len(recent) - num_new * LAUNCH_FIELDS :]
        if len(self._collected) >= _MAX_COLLECTED:
            self.add_up()

    def add_up(self) -> None:
        """Add the forward passes that were collected since the last call to the table, the
        histograms and the seconds.
        """
        if not self._collected:
            return
        passes = np.array(self._collected, np.int64).reshape(-1, LAUNCH_FIELDS)
        self._collected = []
        phases, micros = passes[:, 0], passes[:, 7]
        needed, padded = passes[:, 1:4], passes[:, 4:7]
        size = self._table.block_size
        self._needed_s += _seconds(phases, needed, size)
        self._padded_s += _seconds(phases, padded, size)
        cells = np.concatenate([phases[:, None], rounded_sizes(needed)], 1)
        for cell, count, (cell_micros, *totals) in _summed(cells, micros, *needed.T):
            self._table.add(*cell, cell_micros / 1e6, count)
            for histogram, value, total in zip(
                self._histograms[cell[0]], cell[1:], totals, strict=True
            ):
                # The rounded size falls into the same histogram bucket, because buckets end at
                # powers of two.
                histogram.observe_many(count, value, total)
        is_timed = micros > 0
        buckets = np.concatenate([phases[:, None], padded], 1)[is_timed]
        for bucket, count, (bucket_micros,) in _summed(buckets, micros[is_timed]):
            before_count, before_s = self._times.get(bucket, (0, 0.0))
            self._times[bucket] = before_count + count, before_s + bucket_micros / 1e6


def _seconds(phases: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], block_size: int) -> float:
    """Predict the seconds of all forward passes, with sizes [passes, 3]."""
    batch, query_len, blocks = sizes.T
    return float(forward_seconds(phases, batch, query_len, blocks, block_size).sum())


def _summed(
    rows: Shapes, *values: npt.NDArray[np.int64]
) -> Iterator[tuple[tuple[int, int, int, int], int, list[int]]]:
    """Yield each different row, the number of rows that are equal to it, and sums of their
    values.
    """
    found, index, counts = np.unique(rows, axis=0, return_inverse=True, return_counts=True)
    sums = np.zeros((len(found), len(values)), np.int64)
    np.add.at(sums, index.reshape(-1), np.stack(values, 1))
    for row, count, totals in zip(found.tolist(), counts.tolist(), sums.tolist(), strict=True):
        yield tuple(row), count, totals


class RecordedMetrics(Protocol):
    """Object with the recorded traffic of one replica or of all."""

    @property
    def traffic_table(self) -> TrafficTable: ...

    @property
    def bucket_times(self) -> BucketTimes: ...

    @property
    def device_seconds(self) -> tuple[float, float]: ...

    @property
    def totals(self) -> SchedulerStats: ...


class TrafficFile:
    """Writes the recorded traffic to a file, as a whole and at most once a minute.

    If it cannot be written, a warning is logged once and serving continues.

    Args:
        path: path of the file; an existing table is continued.
        metrics: metrics of the engine.
        clock: returns monotonic seconds.

    Attributes:
        engine: description of the engine that measures the times in the file; None: not known, so
            the file has no times.

    Raises:
        ConfigError: the file is not recorded traffic, or has a different block size.
    """

    def __init__(
        self, path: Path, metrics: "RecordedMetrics", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path, self._metrics, self._clock = path, metrics, clock
        block_size = metrics.traffic_table.block_size
        self._before = TrafficTable(block_size)
        self._times_before: RunTimes | None = None
        self.engine: RunEngine | None = None
        if os.path.exists(path):  # a folder that cannot be read cannot be written either
            self._before = TrafficTable.load(path)
            if self._before.block_size != block_size:
                raise ConfigError(
                    f"--record-traffic {path}: the file was recorded with blocks of "
                    f"{self._before.block_size} tokens, but this engine has blocks of {block_size} "
                    f"tokens. Use another file, or --block-size {self._before.block_size}."
                )
            self._times_before = parse_run_times(json.loads(path.read_text("utf-8-sig")), str(path))
        self._last = clock()
        self._has_failed = self._is_writing = False
        self._lock = threading.Lock()
        self._num_written = 0.0
        """Forward passes of this engine that the file has, the forgotten ones included."""

    def note_engine(self, described: dict[str, Any] | None) -> None:
        """Set the engine that measures times, from the fields of a `RunEngine`; None: unknown."""
        self.engine = None if described is None else msgspec.convert(described, RunEngine)

    async def run(self) -> None:
        """Write once a minute, until the task is cancelled."""
        while True:
            await asyncio.sleep(WRITE_INTERVAL_S / 4)
            self.write_if_due()

    def write_if_due(self) -> None:
        """Write the counts in the background, if a minute has passed since the last write."""
        if self._clock() - self._last < WRITE_INTERVAL_S or self._is_writing:
            return
        table, times = self._metrics.traffic_table.copy(), self._metrics.bucket_times.copy()
        self._last, self._is_writing = self._clock(), True
        start_in_time_slices(lambda: self._write(table, times), "write traffic")

    def write(self) -> None:
        """Write the counts now; used when the engine stops."""
        self._write(self._metrics.traffic_table.copy(), self._metrics.bucket_times.copy())

    def _write(self, found: TrafficTable, times: BucketTimes) -> None:
        """Write the counts of this engine, unless the file already has newer ones."""
        num_launches = found.num_launches + found.num_forgotten
        try:
            with self._lock:
                if num_launches > self._num_written:
                    table = self._before.copy()
                    table.merge(found)
                    table.save(self._path, self._measured(times))
                    self._num_written = num_launches
                    if self._has_failed:
                        logger.info("traffic is written to %s again", self._path)
                    self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                logger.warning(
                    "traffic cannot be written to %s (--record-traffic): %s; the server continues, "
                    "and tries again each minute",
                    *(self._path, error.strerror or error),
                )
            self._has_failed = True
        finally:
            self._is_writing = False

    def _measured(self, times: BucketTimes) -> dict[str, Any]:
        """Return the content for the file with the measured times. Times of a different engine are
        replaced.
        """
        before, engine = self._times_before, self.engine
        if engine is None:
            return {} if before is None else {FIELD: before.to_json()}
        if before is not None and before.engine == engine:
            times = add_times(before.times, times)
        return {FIELD: RunTimes(engine, times).to_json()}


class BucketAdvice:
    """Logs, at most once a day, that other buckets would fit the traffic better.

    Args:
        metrics: metrics of the engine.
        config: config of the engine.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        metrics: RecordedMetrics,
        config: VllmConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics, self._config, self._clock = metrics, config, clock
        self._next = clock()
        self._before = (0.0, 0.0)
        """Device seconds until all buckets were warm."""
        self._is_warm = False

    async def run(self) -> None:
        """Check every ten minutes, until the task is cancelled."""
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            if self.is_due():
                start_in_time_slices(self.advise, "look for better buckets")

    def is_due(self) -> bool:
        """Return whether the buckets pad much, and there is enough traffic to choose others. True
        at most once a day.
        """
        totals = self._metrics.totals
        if totals.warm_up.num_wanted and not (self._is_warm and not totals.warm_up.is_warming):
            # Ignore padding while only the first buckets are warm: it will shrink with the other
            # buckets.
            self._is_warm = not totals.warm_up.is_warming
            self._before = self._metrics.device_seconds
            return False
        needed_s, padded_s = self._seconds
        if (
            self._clock() < self._next
            or not totals.num_kv_blocks  # the engine is restarting
            or padded_s - needed_s <= _POOR_PADDING * padded_s
            or self._metrics.traffic_table.num_launches < MIN_LAUNCHES
        ):
            return False
        self._next = self._clock() + _DAY_S
        return True

    @property
    def _seconds(self) -> tuple[float, float]:
        """Device seconds with all buckets, without padding and with it."""
        needed_s, padded_s = self._metrics.device_seconds
        return needed_s - self._before[0], padded_s - self._before[1]

    def advise(self) -> None:
        """Choose buckets for the traffic so far, and log a line if they pad much less."""
        needed_s, padded_s = self._seconds
        config, table = self._config, self._metrics.traffic_table.copy()
        chosen = choose_for_traffic(
            table,
            traffic_step_limits(config, self._metrics.totals.num_kv_blocks + 1),
            config.hpu.num_buckets,
            longest_prompt=longest_prompt(config),
            max_seconds=_CHOOSING_S,
        )
        present = 1 - needed_s / padded_s
        possible = chosen.padding / (1 + chosen.padding)
        if present - possible >= _MIN_GAIN:
            logger.info(
                "buckets: %.1f %% of the device time is spent on padding; a set of %d buckets "
                "chosen for this traffic would spend %.1f %%. To use it: record the traffic with "
                "--record-traffic FILE, then restart with --traffic FILE",
                *(100 * present, len(chosen.buckets), 100 * possible),
            )
