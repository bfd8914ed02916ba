"""Chooses buckets for the recorded traffic of an engine, and writes them to a file.

Each set includes the mandatory buckets, into which the largest forward pass of each phase fits. So
every forward pass has a bucket.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from vllm.bucketing.bucket import Bucket, Phase, prefill
from vllm.bucketing.catalog.catalog import Catalog, Cost
from vllm.bucketing.catalog.closure import missing_buckets
from vllm.bucketing.optimal import Budget, ChosenBuckets, ShapeCost, choose_buckets
from vllm.bucketing.step_limits import StepLimits, round_up
from vllm.bucketing.traffic import TrafficTable
from vllm.cost_model.padded import forward_seconds

ForPhase = dict[Phase, ChosenBuckets]


@dataclass(frozen=True)
class TrafficBuckets:
    """The buckets of both phases that were chosen for a traffic."""

    by_phase: ForPhase
    """Without a phase that the traffic does not have."""
    buckets: tuple[Bucket, ...]
    """Buckets of both phases, ascending; also the mandatory ones of a phase without traffic."""
    num_asked: int
    """Buckets of each phase that were asked for."""
    num_mandatory: dict[Phase, int]
    """The least number of buckets of each phase."""

    @property
    def lines(self) -> tuple[str, ...]:
        """One line for each phase: its padding, and a bound on how much better it could be. The
        line also names the least number of buckets, if fewer were asked for.
        """
        return tuple(
            self.by_phase[phase].describe() + self._too_few(phase)
            for phase in Phase
            if phase in self.by_phase
        )

    @property
    def padding(self) -> float:
        """Cost of padding, relative to the cost of both phases without padding."""
        cost = sum(chosen.cost for chosen in self.by_phase.values())
        unpadded = sum(chosen.unpadded for chosen in self.by_phase.values())
        return cost / unpadded - 1 if unpadded else 0.0

    def _too_few(self, phase: Phase) -> str:
        least = self.num_mandatory[phase]
        if least <= self.num_asked:
            return ""
        return f". --num-buckets {self.num_asked} is too few; at least {least} are needed"


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
        max_seconds: maximum number of seconds; see `choose_buckets`; half of it for each phase.
    """
    limits = traffic_limits(table, limits, longest_prompt)
    cost = cost or seconds_of(limits)
    mandatory = mandatory_buckets(limits)
    required = {phase: [b for b in mandatory if b.phase is phase] for phase in Phase}
    by_phase: ForPhase = {}
    for phase in Phase:
        shapes, weights = table.shapes_within(limits, phase)
        if not len(shapes):
            continue
        unpadded = float(weights @ cost(*shapes.T))
        if phase is Phase.PREFILL:
            # Query lengths of prompt buckets are multiples of the block size.
            shapes[:, 2] = -(-shapes[:, 2] // limits.block_size) * limits.block_size
        chosen = choose_buckets(
            shapes,
            weights,
            None,
            required[phase],
            budget=Budget.of_count(max(num_buckets, len(required[phase]))),
            cost=cost,
            may_split=True,
            max_seconds=max_seconds / 2,
        )
        by_phase[phase] = replace(chosen, unpadded=unpadded)
    found = {bucket for chosen in by_phase.values() for bucket in chosen.buckets}
    return TrafficBuckets(
        by_phase,
        tuple(sorted(found.union(mandatory))),
        num_buckets,
        {phase: len(buckets) for phase, buckets in required.items()},
    )


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
