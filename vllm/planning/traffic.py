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
from vllm.bucketing.step_limits import ceil_div
from vllm.bucketing.traffic import ROUNDING, Shapes, TrafficTable, Weights
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
            f"{self.num_present} of the engine"
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
        longest_launch = engine.limits.max_query_len
        within = traffic_limits(table, limits)
        padding = recorded_padding(table, buckets, within, seconds, longest_launch)
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
            notes=tuple(_notes_of_recorded(table, limits, source)),
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
        notes=(*requests.notes, *_notes_of_requests(requests, limits, source)),
    )


def _notes_of_recorded(table: TrafficTable, limits: StepLimits, source: str) -> Iterator[str]:
    """Yield what the limits of the engine change in recorded traffic."""
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
    """Yield what the limits of the engine change in requests."""
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
    """Return the cost of padding of recorded forward passes in some buckets, relative to the cost
    without any.

    Args:
        table: recorded.
        buckets: for every forward pass of at most `longest` tokens of a prompt.
        limits: of a step.
        cost: of a padded forward pass.
        longest: tokens of a prompt in one forward pass; longer prompts run in parts.
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
    """Return prefills with no more than so many tokens of each prompt."""
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
