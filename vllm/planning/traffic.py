"""Buckets of a planned engine for a traffic, recorded or replayed from lengths of requests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm.bucketing import Bucket, BucketPlan, Phase, StepLimits, plan_buckets
from vllm.bucketing.catalog.bucket_plan import longest_prompt, traffic_step_limits
from vllm.bucketing.catalog.from_traffic import (
    TrafficBuckets,
    bucket_file_text,
    choose_for_traffic,
    traffic_limits,
)
from vllm.bucketing.optimal import Floats, Ints, ShapeCost, cost_of
from vllm.bucketing.traffic import TrafficTable
from vllm.cost_model.throughput import ServingCost
from vllm.planning.engine_plan import EnginePlan
from vllm.planning.replay import Replay, replay
from vllm.planning.request_lengths import RequestLengths, is_recorded, read_lengths


@dataclass(frozen=True)
class TrafficPlan:
    """The buckets for a traffic."""

    source: str
    num_launches: float
    """Forward passes of the traffic."""
    chosen: TrafficBuckets
    num_present: int
    """Buckets that the engine has without the traffic."""
    present_padding: float
    """Device time of padding in these buckets, relative to the time without any."""
    padding: float
    """Device time of padding in the chosen buckets, relative to the time without any."""
    replayed: Replay | None
    """Replay in the chosen buckets; None: the traffic was recorded."""
    table: TrafficTable
    """Forward passes that the buckets were chosen for."""
    bucket_s: tuple[float, ...]
    """Predicted seconds of a forward pass in each chosen bucket."""
    notes: tuple[str, ...] = ()

    @property
    def certificates(self) -> tuple[str, ...]:
        """The padding of each phase, and the least that any other set could have."""
        return self.chosen.lines

    def lines(self) -> Iterator[str]:
        """Yield the lines of the text."""
        kind = "recorded" if self.replayed is None else "replayed"
        yield f"Traffic {self.source}: {self.num_launches:,.0f} forward passes, {kind}"
        yield from (f"  {note}" for note in self.notes)
        yield from (f"  {line}" for line in self.certificates)
        yield (
            f"  device time of padding: {100 * self.padding:.1f} % with these "
            f"{len(self.chosen.buckets)} buckets, {100 * self.present_padding:.1f} % with the "
            f"{self.num_present} buckets that the engine has otherwise"
        )

    def as_json(self) -> dict[str, Any]:
        """Return these values as JSON objects."""
        result: dict[str, Any] = {
            "source": self.source,
            "num_launches": self.num_launches,
            "num_present_buckets": self.num_present,
            "present_padding": self.present_padding,
            "padding": self.padding,
            "certificates": list(self.certificates),
            "notes": list(self.notes),
            "buckets": [bucket_row(bucket) for bucket in self.chosen.buckets],
            "bucket_s": list(self.bucket_s),
            "shapes": [[*bucket_row(shape), count] for shape, count, _ in self.table],
        }
        if self.replayed is not None:
            waited = self.replayed.first_tokens - self.replayed.arrivals
            result["replay"] = {
                "seconds": self.replayed.seconds,
                "steps": self.replayed.num_steps,
                "preemptions": self.replayed.num_preemptions,
                "first_token_s": {f"p{p}": float(np.percentile(waited, p)) for p in (50, 90, 99)},
            }
        return result

    def file_text(self) -> str:
        """Return a bucket file with the certificates as comments."""
        return bucket_file_text(self.chosen.buckets, (*self.certificates, f"for {self.source}"))


def read_traffic(path: Path) -> TrafficTable | RequestLengths:
    """Read recorded traffic, or lengths of requests.

    Raises:
        ConfigError: the file is damaged or has no traffic.
    """
    return TrafficTable.load(path) if is_recorded(path) else read_lengths(path)


def plan_traffic(
    engine: EnginePlan,
    traffic: TrafficTable | RequestLengths,
    source: str,
    num_buckets: int,
    cost: ServingCost,
) -> TrafficPlan:
    """Choose the buckets of an engine for a traffic.

    Args:
        engine: planned, with the buckets that it has without the traffic.
        traffic: for which they are chosen.
        source: name of its file.
        num_buckets: of each phase.
        cost: of its steps.

    Raises:
        ConfigError: the traffic is of another block size.
    """
    config, num_blocks = engine.config, engine.report.num_blocks
    seconds = shape_seconds(cost, config.cache.block_size)
    present = BucketPlan(engine.catalog, engine.limits, (), ())
    limits = traffic_step_limits(config, num_blocks)
    longest = longest_prompt(config)

    def choose(table: TrafficTable) -> TrafficBuckets:
        return choose_for_traffic(table, limits, num_buckets, longest_prompt=longest, cost=seconds)

    num_present = len(engine.catalog)
    if isinstance(traffic, TrafficTable):
        table = traffic
        table.check(source, config.cache.block_size)
        chosen = choose(table)
        buckets = (*engine.catalog.prefill, *engine.catalog.decode)
        padding = recorded_padding(table, buckets, traffic_limits(table, limits), seconds)
        return TrafficPlan(
            source=source,
            num_launches=table.num_launches,
            chosen=chosen,
            num_present=num_present,
            present_padding=padding,
            padding=chosen.padding,
            replayed=None,
            table=table,
            bucket_s=bucket_seconds(chosen.buckets, seconds),
        )
    requests = traffic

    def seconds_of(bucket: Bucket) -> float:
        return bucket_seconds([bucket], seconds)[0]

    first = replay(config, num_blocks, present, requests, seconds_of)
    chosen = choose(first.table)
    # The planner groups prompts by the buckets that there are.
    sizes = tuple((int(b.phase), b.batch, b.query_len, b.blocks) for b in chosen.buckets)
    hpu = replace(config.hpu, bucketing_strategy="optimal", chosen_buckets=sizes)
    with_chosen = replace(config, hpu=hpu)
    plan = plan_buckets(with_chosen, num_blocks)
    second = replay(with_chosen, num_blocks, plan, requests, seconds_of)
    return TrafficPlan(
        source=source,
        num_launches=first.table.num_launches,
        chosen=chosen,
        num_present=num_present,
        present_padding=first.padding,
        padding=second.padding,
        replayed=second,
        table=first.table,
        bucket_s=bucket_seconds(chosen.buckets, seconds),
        notes=requests.notes,
    )


def recorded_padding(
    table: TrafficTable, buckets: tuple[Bucket, ...], limits: StepLimits, cost: ShapeCost
) -> float:
    """Return the cost of padding of recorded forward passes in some buckets, relative to the cost
    without any."""
    total = needed = 0.0
    for phase in Phase:
        shapes, weights = table.shapes_within(limits, phase)
        if len(shapes):
            of_phase = [bucket for bucket in buckets if bucket.phase is phase]
            total += cost_of(of_phase, shapes, weights, cost, may_split=True)
            needed += float(weights @ cost(*shapes.T))
    return total / needed - 1 if needed else 0.0


def shape_seconds(cost: ServingCost, block_size: int) -> ShapeCost:
    """Return the predicted seconds of forward passes of an engine, as a function of their sizes."""

    def seconds(phase: Ints, batch: Ints, query_len: Ints, blocks: Ints) -> Floats:
        rows, tokens, held = (size.astype(np.float64) for size in (batch, query_len, blocks))
        attention, terms = cost.prefill_terms(rows, tokens, held)
        decode_terms = cost.decode_terms(rows, held * block_size, tokens)
        prefill_s = attention + terms @ cost.fitted.values
        decode_s = decode_terms @ cost.fitted.values
        found: Floats = np.where(phase == Phase.DECODE, decode_s, prefill_s)
        return found

    return seconds


def bucket_seconds(buckets: Sequence[Bucket], cost: ShapeCost) -> tuple[float, ...]:
    """Return the predicted seconds of a forward pass in each bucket."""
    sizes = np.array([(b.phase, b.batch, b.query_len, b.blocks) for b in buckets], np.int64)
    return tuple(cost(*sizes.reshape(-1, 4).T).tolist())


def bucket_row(bucket: Bucket) -> list[str | int]:
    """Return a bucket for JSON."""
    return [str(bucket.phase), bucket.batch, bucket.query_len, bucket.blocks]
