"""Combine the metrics of several replicas: each replica's own, and sums for readers that want one
value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest
from operator import add
from typing import TypeVar

import msgspec

from vllm.bucketing.traffic import TrafficTable
from vllm.config import VllmConfig
from vllm.cost_model.run_times import BucketTimes, add_times
from vllm.engine.metrics.engine_metrics import NUM_RECENT, EngineMetrics, FinishedRequestStats
from vllm.engine.metrics.history import Rates
from vllm.engine.metrics.media_metrics import MediaReadStats, read_metrics
from vllm.engine.metrics.registry import AnyMetrics, MergedMetrics
from vllm.messages import (
    DraftStats,
    MediaStats,
    RunnerStats,
    SchedulerStats,
    TransferStats,
    WarmUpStats,
)

_Counters = TypeVar("_Counters", MediaStats, RunnerStats, TransferStats)


@dataclass(frozen=True)
class ReplicaMetrics:
    """The metrics of several replicas. Every exposed sample has the label `engine`, the index of
    its replica.
    """

    replicas: Sequence[EngineMetrics]
    """The replicas, at least one."""
    read_media: Callable[[], MediaReadStats | None] = lambda: None
    """Returns what the server has read of media for all replicas; None: the model reads text only.
    Its metrics have the label of the first replica."""

    @property
    def model_name(self) -> str:
        """Model name, which is a label of every sample."""
        return self.replicas[0].model_name

    @property
    def config(self) -> VllmConfig:
        """The config of the engine."""
        return self.replicas[0].config

    @property
    def recent(self) -> list[FinishedRequestStats]:
        """The requests of all replicas that finished last, the oldest first."""
        found = [request for replica in self.replicas for request in replica.recent]
        return sorted(found, key=lambda request: request.finished)[-NUM_RECENT:]

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens of all replicas."""
        return sum(replica.num_prompt_tokens for replica in self.replicas)

    @property
    def num_generation_tokens(self) -> int:
        """Number of generated tokens of all replicas."""
        return sum(replica.num_generation_tokens for replica in self.replicas)

    @property
    def num_restarts(self) -> int:
        """Number of restarts of all replicas."""
        return sum(replica.num_restarts for replica in self.replicas)

    @property
    def totals(self) -> SchedulerStats:
        """Statistics of all replicas together."""
        return sum_stats([replica.totals for replica in self.replicas])

    @property
    def traffic_table(self) -> TrafficTable:
        """The traffic of all replicas."""
        first, *others = (replica.traffic_table for replica in self.replicas)
        if not others:
            return first
        table = first.copy()
        for other in others:
            table.merge(other)
        return table

    @property
    def device_seconds(self) -> tuple[float, float]:
        """Predicted seconds of all replicas, without padding and with it."""
        needed, padded = zip(*(r.device_seconds for r in self.replicas), strict=True)
        return sum(needed), sum(padded)

    @property
    def bucket_times(self) -> BucketTimes:
        """Measured seconds of forward passes of all replicas, by bucket."""
        return add_times(*(replica.bucket_times for replica in self.replicas))

    def rates(self) -> Rates:
        """Return the tokens per second, summed over all replicas."""
        every = [replica.rates() for replica in self.replicas]
        prompt, generation = zip(*every, strict=True)
        return Rates(
            [sum(second) for second in zip(*prompt, strict=True)],
            [sum(second) for second in zip(*generation, strict=True)],
        )

    def metric_sets(self) -> list[AnyMetrics]:
        """Return all metrics, to be exposed."""
        every = [replica.metric_sets() for replica in self.replicas]
        sets: list[AnyMetrics] = [MergedMetrics(parts) for parts in zip(*every, strict=True)]
        media = self.read_media()
        if media is not None:
            sets.append(read_metrics(media, self.model_name))
        return sets


def sum_stats(every: Sequence[SchedulerStats]) -> SchedulerStats:
    """Merge the statistics of several replicas: counts are summed, and the KV cache usage covers
    all blocks.

    Args:
        every: statistics of at least one replica.
    """
    if len(every) == 1:
        return every[0]
    num_blocks = sum(stats.num_kv_blocks for stats in every)
    num_used = sum(stats.num_kv_blocks * stats.kv_cache_usage for stats in every)
    positions = zip_longest(*(stats.drafts.accepted for stats in every), fillvalue=0)
    numbers = (
        "num_running",
        "num_waiting",
        "num_prefix_queries",
        "num_prefix_hits",
        "num_preemptions",
    )
    return SchedulerStats(
        **{name: sum(getattr(stats, name) for stats in every) for name in numbers},
        running_adapters=sorted({name for stats in every for name in stats.running_adapters}),
        waiting_adapters=sorted({name for stats in every for name in stats.waiting_adapters}),
        num_kv_blocks=num_blocks,
        kv_cache_usage=num_used / num_blocks if num_blocks else 0.0,
        drafts=DraftStats(
            num_drafts=sum(stats.drafts.num_drafts for stats in every),
            num_draft_tokens=sum(stats.drafts.num_draft_tokens for stats in every),
            num_declined_steps=sum(stats.drafts.num_declined_steps for stats in every),
            accepted=tuple(map(sum, positions)),
        ),
        transfer=reduce(_add, (stats.transfer for stats in every)),
        media=reduce(_add, (stats.media for stats in every)),
        warm_up=_sum_warm_up([stats.warm_up for stats in every]),
        runner=reduce(_add, (stats.runner for stats in every)),
    )


def _sum_warm_up(every: Sequence[WarmUpStats]) -> WarmUpStats:
    """Merge the warm-up statistics of all replicas: sums of buckets, and the maximum of times and
    padding.
    """
    seconds = [stats.seconds_left for stats in every if stats.seconds_left is not None]
    shares = [stats.padded_share for stats in every if stats.padded_share is not None]
    return WarmUpStats(
        is_warming=any(stats.is_warming for stats in every),
        num_warm=sum(stats.num_warm for stats in every),
        num_wanted=sum(stats.num_wanted for stats in every),
        seconds_left=max(seconds, default=None),
        longest_delay_s=max(stats.longest_delay_s for stats in every),
        padded_share=max(shares, default=None),
    )


def _add(one: _Counters, other: _Counters) -> _Counters:
    sums = map(add, msgspec.structs.astuple(one), msgspec.structs.astuple(other))
    return type(one)(**dict(zip(one.__struct_fields__, sums, strict=True)))


ReadableMetrics = EngineMetrics | ReplicaMetrics
"""The metrics that logs and pages read, of one replica or of all together."""
