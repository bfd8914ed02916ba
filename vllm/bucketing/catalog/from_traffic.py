"""Chooses buckets for the recorded traffic of an engine, and writes them to a file.

Each set includes the mandatory buckets, into which the largest forward pass of each phase fits. So
every forward pass has a bucket.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from vllm.bucketing.bucket import Bucket, Phase, prefill
from vllm.bucketing.catalog.catalog import Catalog, Cost
from vllm.bucketing.catalog.closure import missing_buckets
from vllm.bucketing.optimal import Budget, ChosenBuckets, ShapeCost, choose_buckets
from vllm.bucketing.optimal.shapes import sizes_of
from vllm.bucketing.step_limits import StepLimits, round_up
from vllm.bucketing.traffic import TrafficTable
from vllm.cost_model.padded import forward_seconds
from vllm.errors import ConfigError


@dataclass(frozen=True)
class TrafficBuckets:
    """The buckets of both phases that were chosen for a traffic."""

    choices: tuple[ChosenBuckets, ...]
    """The choice for each phase that the traffic has; one for both phases if they share a budget.
    """
    buckets: tuple[Bucket, ...]
    """Buckets of both phases, ascending; also the mandatory ones of a phase without traffic."""
    lines: tuple[str, ...]
    """One line for each choice: its padding, and a bound on how much better it could be. The line
    also names the least number of buckets, if fewer were asked for."""

    @property
    def padding(self) -> float:
        """Cost of padding, relative to the cost of both phases without padding."""
        cost = sum(chosen.cost for chosen in self.choices)
        unpadded = sum(chosen.unpadded for chosen in self.choices)
        return cost / unpadded - 1 if unpadded else 0.0


def seconds_of(limits: StepLimits) -> ShapeCost:
    """Return a function that predicts the seconds of forward passes of an engine."""
    return partial(forward_seconds, block_size=limits.block_size)


def bucket_cost(block_size: int) -> Cost:
    """Return a function that predicts the cost of a bucket, to compare buckets."""
    return lambda b: forward_seconds(b.phase, b.batch, b.query_len, b.blocks, block_size)


def traffic_limits(
    table: TrafficTable, limits: StepLimits, longest_prompt: int | None = None
) -> StepLimits:
    """Return limits of a forward pass whose longest prompt is the longest one of the traffic.

    Args:
        table: recorded traffic.
        limits: limits of a step.
        longest_prompt: tokens of the longest prompt bucket; None: from the traffic.
    """
    if longest_prompt is None:
        shapes, _ = table.shapes(Phase.PREFILL)
        longest_prompt = int(shapes[:, 2].max()) if len(shapes) else limits.block_size
    longest = round_up(longest_prompt, limits.block_size)
    if longest >= limits.max_query_len:
        return limits
    # A part of a prompt has context even if chunked prefill is off.
    return replace(limits, enable_chunked_prefill=True, max_chunk_tokens=longest)


def mandatory_buckets(limits: StepLimits) -> list[Bucket]:
    """Return the fewest buckets into which every forward pass fits: the largest of each phase."""
    longest = round_up(limits.max_query_len, limits.block_size)
    return missing_buckets(Catalog([prefill(1, longest)], []), limits) or [prefill(1, longest)]


def choose_for_traffic(
    table: TrafficTable,
    limits: StepLimits,
    num_buckets: int,
    *,
    longest_prompt: int | None = None,
    cost: ShapeCost | None = None,
    budget: Budget | None = None,
    max_seconds: float = 10.0,
) -> TrafficBuckets:
    """Choose the buckets of an engine for a traffic.

    Args:
        table: traffic, with the block size of the engine.
        limits: limits of a step.
        num_buckets: number of buckets of each phase, mandatory ones included; more only if there
            are more mandatory ones.
        longest_prompt: tokens of the longest prompt; see `traffic_limits`.
        cost: cost of a forward pass; None: of a model with 8 billion parameters.
        budget: limit of the buckets of both phases together, instead of their number.
        max_seconds: maximum number of seconds; see `choose_buckets`; half of it for each phase.

    Raises:
        ConfigError: the budget is less than the mandatory buckets take.
    """
    limits = traffic_limits(table, limits, longest_prompt)
    cost = cost or seconds_of(limits)
    mandatory = mandatory_buckets(limits)
    by_phase = {phase: table.shapes_within(limits, phase) for phase in Phase}
    exact = {p: float(weights @ cost(*shapes.T)) for p, (shapes, weights) in by_phase.items()}
    # Query lengths of prompt buckets are multiples of the block size.
    prompts = by_phase[Phase.PREFILL][0]
    prompts[:, 2] = -(-prompts[:, 2] // limits.block_size) * limits.block_size
    choose = partial(choose_buckets, candidates=None, cost=cost, may_split=True)
    choices, lines = [], []
    if budget is not None:
        _check_budget(budget, mandatory)
        shapes, weights = (np.concatenate(parts) for parts in zip(*by_phase.values(), strict=True))
        found = choose(shapes, weights, mandatory=mandatory, budget=budget, max_seconds=max_seconds)
        choices = [replace(found, unpadded=sum(exact.values()))]
        lines = [choices[0].describe()]
    for phase, (shapes, weights) in by_phase.items():
        if budget is not None or not len(shapes):
            continue
        required = [bucket for bucket in mandatory if bucket.phase is phase]
        count = max(num_buckets, len(required))
        found = choose(
            shapes, weights, mandatory=required, count=count, max_seconds=max_seconds / 2
        )
        choices.append(replace(found, unpadded=exact[phase]))
        too_few = ""
        if num_buckets < len(required):
            too_few = (
                f". --num-buckets {num_buckets} is too few; at least {len(required)} are needed"
            )
        lines.append(choices[-1].describe() + too_few)
    buckets = {bucket for found in choices for bucket in found.buckets}
    return TrafficBuckets(tuple(choices), tuple(sorted(buckets.union(mandatory))), tuple(lines))


def _check_budget(budget: Budget, mandatory: list[Bucket]) -> None:
    """Check that a budget allows the mandatory buckets.

    Raises:
        ConfigError: it does not; the error names the least budget.
    """
    least = float(budget.price(*sizes_of(mandatory).T).sum())
    if least > budget.limit:
        raise ConfigError(
            f"{budget.name} {budget.limit:g} is too small: the {len(mandatory)} buckets that every "
            f"traffic needs take {least:.3g} {budget.unit}. Set it to at least "
            f"{_rounded_up(least)}"
        )


def _rounded_up(value: float) -> str:
    """Return a number with three digits that is not smaller."""
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / step) * step:.6g}"


def bucket_file_text(buckets: Iterable[Bucket], lines: Iterable[str] = ()) -> str:
    """Return the text of a file for VLLM_BUCKETING_FROM_FILE.

    A decode that verifies drafts is written like one without drafts: the engine adds the query
    length.

    Args:
        buckets: buckets to write.
        lines: comment lines.
    """
    found = sorted({replace(b, query_len=1) if b.phase is Phase.DECODE else b for b in buckets})
    comments = [f"# {line}" for line in (*lines, "batch, query_len, blocks")]
    return "\n".join([*comments, *(f"({b.batch}, {b.query_len}, {b.blocks})" for b in found), ""])
