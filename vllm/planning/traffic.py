"""Chooses buckets of a planned engine for a traffic, recorded or replayed from request lengths."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm.bucketing import Bucket, Phase, StepLimits
from vllm.bucketing.catalog.bucket_plan import (
    BucketPlan,
    longest_prompt,
    plan_buckets,
    traffic_step_limits,
)
from vllm.bucketing.catalog.from_traffic import (
    TrafficBuckets,
    bucket_file_text,
    choose_for_traffic,
    traffic_limits,
)
from vllm.bucketing.optimal import Budget, Floats, Ints, ShapeCost, cost_of
from vllm.bucketing.step_limits import ceil_div
from vllm.bucketing.traffic import ROUNDING, Shapes, TrafficTable, Weights
from vllm.cost_model.throughput import ServingCost
from vllm.planning.engine_plan import EnginePlan
from vllm.planning.replay import Replay, replay
from vllm.planning.replayed_speed import MAX_SEARCHED, RateChoice, ReplaySpeed, highest_rate
from vllm.planning.request_lengths import RequestLengths, is_recorded, read_lengths
from vllm.planning.throughput.goals import Goals

Traffic = TrafficTable | RequestLengths
"""Recorded sizes of forward passes, or lengths of requests."""

Choose = Callable[[TrafficTable], TrafficBuckets]
"""Chooses the buckets for a traffic."""


@dataclass(frozen=True)
class TrafficPlan:
    """The buckets for a traffic, as part of a plan."""

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
    at_goals: RateChoice | None = None
    """The highest rate that meets goals for times; None: there are none, or nothing to replay."""

    @property
    def certificates(self) -> tuple[str, ...]:
        """For each phase, the padding and the lower bound for any other set of buckets, as text."""
        return self.chosen.lines

    def lines(self) -> Iterator[str]:
        """Yield the section about the traffic as lines of text."""
        kind = "recorded" if self.replayed is None else "replayed"
        yield f"Traffic {self.source}: {self.num_launches:,.0f} forward passes, {kind}"
        yield from (f"  {note}" for note in self.notes)
        yield from (f"  {line}" for line in self.certificates)
        yield (
            f"  device time of padding: {100 * self.padding:.1f} % with these "
            f"{len(self.chosen.buckets)} buckets, {100 * self.present_padding:.1f} % with the "
            f"{self.num_present} buckets that the engine has otherwise"
        )
        if self.replayed is not None:
            yield from (f"  {line}" for line in ReplaySpeed.of(self.replayed).lines())
        if self.at_goals is not None:
            yield from (f"  {line}" for line in self.at_goals.lines())

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
            result["replay"] = {
                "seconds": self.replayed.seconds,
                "steps": self.replayed.num_steps,
                **ReplaySpeed.of(self.replayed).as_json(),
            }
        if self.at_goals is not None:
            result["at_goals"] = self.at_goals.as_json()
        return result

    def file_text(self) -> str:
        """Return the text of a bucket file, with the padding of each phase as comments."""
        return bucket_file_text(self.chosen.buckets, (*self.certificates, f"for {self.source}"))


def read_traffic(path: Path) -> Traffic:
    """Read recorded traffic, or lengths of requests, from a file.

    Raises:
        ConfigError: the file is damaged or has no traffic.
    """
    return TrafficTable.load(path) if is_recorded(path) else read_lengths(path)


def plan_traffic(
    engine: EnginePlan,
    traffic: Traffic,
    source: str,
    num_buckets: int,
    cost: ServingCost,
    goals: Goals | None = None,
    budget: Budget | None = None,
) -> TrafficPlan:
    """Choose the buckets of an engine for a traffic.

    Lengths of requests are replayed with these buckets, and with the original buckets at the
    highest rate that meets the goals for times.

    Args:
        engine: planned, with the buckets that it has without the traffic.
        traffic: traffic for which buckets are chosen.
        source: name of its file.
        num_buckets: number of buckets of each phase.
        cost: cost of its steps.
        goals: goals for the requests; None: none.
        budget: limit of all buckets, instead of their number; None: none.

    Raises:
        ConfigError: the traffic has another block size, or the budget is too small.
    """
    seconds = shape_seconds(cost, engine.config.cache.block_size)
    limits = traffic_step_limits(engine.config, engine.report.num_blocks)

    def choose(table: TrafficTable) -> TrafficBuckets:
        return choose_for_traffic(
            table,
            limits,
            num_buckets,
            longest_prompt=longest_prompt(engine.config),
            cost=seconds,
            budget=budget,
        )

    if isinstance(traffic, TrafficTable):
        return _plan_recorded(engine, traffic, source, choose, seconds)
    return _plan_requests(engine, traffic, source, choose, seconds, goals)


def _plan_recorded(
    engine: EnginePlan, table: TrafficTable, source: str, choose: Choose, seconds: ShapeCost
) -> TrafficPlan:
    table.check(source, engine.config.cache.block_size)
    chosen = choose(table)
    limits = traffic_step_limits(engine.config, engine.report.num_blocks)
    buckets = (*engine.catalog.prefill, *engine.catalog.decode)
    longest_launch = engine.limits.max_query_len
    within = traffic_limits(table, limits)
    return TrafficPlan(
        source=source,
        num_launches=table.num_launches,
        chosen=chosen,
        num_present=len(engine.catalog),
        present_padding=recorded_padding(table, buckets, within, seconds, longest_launch),
        padding=chosen.padding,
        replayed=None,
        table=table,
        bucket_s=bucket_seconds(chosen.buckets, seconds),
        notes=tuple(_notes_of_recorded(table, limits, source)),
    )


def _plan_requests(
    engine: EnginePlan,
    requests: RequestLengths,
    source: str,
    choose: Choose,
    seconds: ShapeCost,
    goals: Goals | None,
) -> TrafficPlan:
    config, num_blocks = engine.config, engine.report.num_blocks
    limits = traffic_step_limits(config, num_blocks)

    def seconds_of(bucket: Bucket) -> float:
        return bucket_seconds([bucket], seconds)[0]

    present = BucketPlan(engine.catalog, engine.limits, (), ())
    first = replay(config, num_blocks, present, requests, seconds_of)
    chosen = choose(first.table)
    # Replay again, because the planner of batches groups prompts by the available buckets.
    sizes = tuple((int(b.phase), b.batch, b.query_len, b.blocks) for b in chosen.buckets)
    hpu = replace(config.hpu, bucketing_strategy="optimal", chosen_buckets=sizes)
    with_chosen = replace(config, hpu=hpu)
    plan = plan_buckets(with_chosen, num_blocks)

    second = replay(with_chosen, num_blocks, plan, requests, seconds_of)
    notes = [*requests.notes, *_notes_of_requests(requests, limits, source)]
    at_goals = None
    if goals is not None and goals.has_times:
        some = requests.part(slice(MAX_SEARCHED))
        if len(some) < len(requests):
            notes.append(f"{source}: the rate is searched with the first {len(some):,} requests")
        # At another rate shapes differ, and the chosen buckets may pad them much.
        at_goals = highest_rate(
            lambda rate: replay(config, num_blocks, present, some.at_rate(rate), seconds_of),
            goals,
            some.rate or 1.0,
        )
    return TrafficPlan(
        source=source,
        num_launches=first.table.num_launches,
        chosen=chosen,
        num_present=len(engine.catalog),
        present_padding=first.padding,
        padding=second.padding,
        replayed=second,
        table=first.table,
        bucket_s=bucket_seconds(chosen.buckets, seconds),
        notes=tuple(notes),
        at_goals=at_goals,
    )


def _notes_of_recorded(table: TrafficTable, limits: StepLimits, source: str) -> Iterator[str]:
    """Yield notes about recorded traffic that exceeds the limits of the engine."""
    most_blocks = limits.max_context_blocks(1), limits.max_blocks
    num_cut = 0.0
    for phase, blocks in zip(Phase, most_blocks, strict=True):
        shapes, weights = table.shapes(phase)
        query_len = limits.max_query_len if phase is Phase.PREFILL else limits.decode_query_lens[-1]
        most = np.array([limits.max_decode_batch, query_len, blocks])
        num_cut += float(weights[(shapes[:, 1:] > most * ROUNDING).any(1)].sum())
    if num_cut:
        yield (
            f"{source}: {num_cut:,.0f} forward passes are larger than those of this engine, and "
            f"are cut to its limits"
        )


def _notes_of_requests(requests: RequestLengths, limits: StepLimits, source: str) -> Iterator[str]:
    """Yield notes about requests that exceed the limits of the engine."""
    lengths = requests.num_inputs + np.maximum(requests.num_outputs, 1)
    if num_cut := int((lengths > limits.max_seq_len).sum()):
        yield (
            f"{source}: {num_cut:,} of {len(requests):,} requests are longer than "
            f"{limits.max_seq_len} tokens, the most that this engine takes, and are cut"
        )


def recorded_padding(
    table: TrafficTable,
    buckets: tuple[Bucket, ...],
    limits: StepLimits,
    cost: ShapeCost,
    longest: int,
) -> float:
    """Return the cost of padding of recorded forward passes, relative to the cost without padding.

    Args:
        table: recorded traffic.
        buckets: buckets for every forward pass of at most `longest` tokens of a prompt.
        limits: limits of a step.
        cost: cost of a padded forward pass.
        longest: tokens of a prompt in one forward pass; longer prompts run in chunks.
    """
    total = needed = 0.0
    for phase in Phase:
        shapes, weights = table.shapes_within(limits, phase)
        if phase is Phase.PREFILL:
            shapes, weights = _in_parts(shapes, weights, limits, longest)
        if len(shapes):
            of_phase = [bucket for bucket in buckets if bucket.phase is phase]
            total += cost_of(of_phase, shapes, weights, cost, may_split=True)
            needed += float(weights @ cost(*shapes.T))
    return total / needed - 1 if needed else 0.0


def _in_parts(
    shapes: Shapes, weights: Weights, limits: StepLimits, longest: int
) -> tuple[Shapes, Weights]:
    """Split prefills into chunks of at most `longest` tokens of each prompt."""
    parts = [
        (phase, batch, size, min(blocks + ceil_div(start, limits.block_size), most), weight)
        for (phase, batch, query_len, blocks), weight in zip(
            shapes.tolist(), weights.tolist(), strict=True
        )
        for start in range(0, query_len, longest)
        for size in (min(longest, query_len - start),)
        for most in (limits.max_context_blocks(size if batch == 1 else 1),)
    ]
    found = np.array([part[:4] for part in parts], np.int64).reshape(-1, 4)
    return found, np.array([part[4] for part in parts], np.float64)


def shape_seconds(cost: ServingCost, block_size: int) -> ShapeCost:
    """Return a function that predicts the seconds of forward passes from their sizes."""

    def seconds(phase: Ints, batch: Ints, query_len: Ints, blocks: Ints) -> Floats:
        rows, tokens, held = (size.astype(np.float64) for size in (batch, query_len, blocks))
        attention, terms = cost.prefill_terms(rows, tokens, held)
        decode_terms = cost.decode_terms(rows, held * block_size, tokens)
        prefill_s = attention + terms @ cost.fitted.values
        decode_s = decode_terms @ cost.fitted.values
        return np.where(phase == Phase.DECODE, decode_s, prefill_s)

    return seconds


def bucket_seconds(buckets: Sequence[Bucket], cost: ShapeCost) -> tuple[float, ...]:
    """Predict the seconds of a forward pass in each bucket."""
    sizes = np.array([(b.phase, b.batch, b.query_len, b.blocks) for b in buckets], np.int64)
    return tuple(cost(*sizes.reshape(-1, 4).T).tolist())


def bucket_row(bucket: Bucket) -> list[str | int]:
    """Return a bucket as a list for JSON."""
    return [str(bucket.phase), bucket.batch, bucket.query_len, bucket.blocks]
