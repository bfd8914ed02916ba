"""Chooses the few buckets with which a server starts, and the order of the others.

The first ones are closed: every forward pass of every step fits into one of them, so none is
compiled while a request waits. They include the largest buckets, so no bucket that is warmed up
later needs more memory. The others are chosen to minimize padding.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from vllm.bucketing.bucket import Bucket, Phase, prefill
from vllm.bucketing.catalog.catalog import Catalog, padded_cost
from vllm.bucketing.catalog.closure import prove
from vllm.bucketing.optimal import ShapeCost, choose_buckets
from vllm.bucketing.step_limits import StepLimits
from vllm.bucketing.traffic import Shapes, TrafficTable, Weights, even_traffic

Size = Callable[[Bucket], float]
"""A size to which the memory of a forward pass, or a part of it, is proportional."""

_MAX_SHAPES = 512
"""Shapes of a phase that decide about the order of the others: the most frequent ones."""

_MAX_SECONDS = 2.0
"""Maximum number of seconds for choosing the first buckets of each phase."""


def choose_first(
    catalog: Catalog,
    limits: StepLimits,
    num_buckets: int,
    traffic: TrafficTable,
    cost: ShapeCost,
    *,
    memory_sizes: Sequence[Size] = (padded_cost,),
    preferred: Collection[Bucket] = (),
) -> list[Bucket]:
    """Choose the buckets to warm up before the first request, from a closed catalog.

    The chosen buckets are closed as well.

    Args:
        catalog: has a bucket for every forward pass.
        limits: limits of a step.
        num_buckets: number of buckets of each phase; more if closure and memory need more.
        traffic: traffic for which padding should be cheap.
        cost: seconds of a padded forward pass.
        memory_sizes: functions for each phase; the bucket with the largest value of each function
            is chosen.
        preferred: buckets that take less time to warm up; if they are enough, no others are chosen.
    """
    chosen: list[Bucket] = []
    for phase, buckets in ((Phase.PREFILL, catalog.prefill), (Phase.DECODE, catalog.decode)):
        if not buckets:
            continue
        found = mandatory_buckets(buckets, limits, memory_sizes)
        liked = [bucket for bucket in buckets if bucket in preferred]
        for candidates in (liked, buckets):
            found = _fill(
                found, candidates, num_buckets, traffic.shapes_within(limits, phase), cost
            )
        chosen += found
    return sorted(chosen)


def mandatory_buckets(
    buckets: Sequence[Bucket], limits: StepLimits, memory_sizes: Iterable[Size] = ()
) -> list[Bucket]:
    """Return a small set of buckets into which every forward pass of a phase fits.

    It includes the largest buckets of the phase. Prompts have one bucket for each batch size, with
    the longest query and the most context, although no prompt has both. It replaces a bucket for
    each length.

    Args:
        buckets: buckets of one phase.
        limits: limits of a step.
        memory_sizes: see `choose_first`.
    """
    kept: list[Bucket] = []
    for bucket in sorted(buckets, key=lambda b: (padded_cost(b), b), reverse=True):
        if not any(other.covers(bucket) for other in kept):
            kept.append(bucket)
    uncovered = _uncovered(kept, limits)
    largest = {max(buckets, key=lambda b: (size(b), b)) for size in memory_sizes}
    for bucket in reversed(kept[:]):
        fewer = [other for other in kept if other != bucket]
        if bucket not in largest and fewer and _uncovered(fewer, limits) == uncovered:
            kept = fewer
    if kept[0].phase is Phase.PREFILL:
        kept = _joined(kept)
    return sorted({*largest, *kept})


def _joined(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return one bucket for each batch size of prompts, into which all its buckets fit."""
    of_batch: dict[int, list[Bucket]] = {}
    for bucket in buckets:
        of_batch.setdefault(bucket.batch, []).append(bucket)
    return [
        prefill(batch, max(b.query_len for b in found), max(b.blocks for b in found))
        for batch, found in of_batch.items()
    ]


def even_shapes(limits: StepLimits) -> list[tuple[Shapes, Weights]]:
    """Return shapes for each phase that are spread evenly on a logarithmic scale, with weights.

    The weights of a phase add up to 1.
    """
    table, found = even_traffic(limits), []
    for phase in Phase:
        shapes, _ = table.shapes_within(limits, phase)
        shapes = shapes[:: 1 + len(shapes) // _MAX_SHAPES]
        found.append((shapes, np.full(len(shapes), 1 / max(1, len(shapes)))))
    return found


def savings(
    candidates: Sequence[Bucket],
    catalog: Catalog,
    demand: Sequence[tuple[Shapes, Weights]],
    cost: ShapeCost,
) -> list[float]:
    """Return how many seconds each candidate bucket would save if it were added.

    Args:
        candidates: the further buckets.
        catalog: the buckets in use.
        demand: for each phase, the shapes that were needed, and how often.
        cost: seconds of a padded forward pass.
    """
    found = [0.0] * len(candidates)
    for phase in Phase:
        shapes, weights = _most_frequent(*demand[phase])
        held = [catalog.fit(phase, *sizes) for sizes in shapes[:, 1:].tolist()]
        present = _seconds([bucket for bucket in held if bucket is not None], cost)
        is_held = np.array([bucket is not None for bucket in held], bool)
        shapes, weights = shapes[is_held, 1:], weights[is_held]
        chosen = [i for i, bucket in enumerate(candidates) if bucket.phase is phase]
        prices = _seconds([candidates[i] for i in chosen], cost)
        for i, price in zip(chosen, prices.tolist(), strict=True):
            bucket = candidates[i]
            covered = (shapes <= (bucket.batch, bucket.query_len, bucket.blocks)).all(axis=1)
            found[i] = float(weights[covered] @ np.maximum(present[covered] - price, 0.0))
    return found


def padded_share(
    catalog: Catalog, demand: Sequence[tuple[Shapes, Weights]], cost: ShapeCost
) -> float | None:
    """Return the fraction of the time of forward passes that is padding; None without traffic.

    Args:
        catalog: the buckets to which they are padded.
        demand: see `savings`.
        cost: cost; see `savings`.
    """
    needed = padded = 0.0
    for phase in Phase:
        shapes, weights = _most_frequent(*demand[phase])
        held = [catalog.fit(phase, *sizes) for sizes in shapes[:, 1:].tolist()]
        is_held = np.array([bucket is not None for bucket in held], bool)
        padded += float(weights[is_held] @ _seconds([b for b in held if b is not None], cost))
        needed += float(weights[is_held] @ cost(*shapes[is_held].T))
    return max(0.0, 1 - needed / padded) if padded else None


def _fill(
    chosen: list[Bucket],
    candidates: Sequence[Bucket],
    num_buckets: int,
    traffic: tuple[Shapes, Weights],
    cost: ShapeCost,
) -> list[Bucket]:
    """Add candidates to the chosen buckets, with which the traffic costs the least."""
    shapes, weights = traffic
    is_held = np.zeros(len(shapes), bool)
    for bucket in chosen:
        sizes = (bucket.batch, bucket.query_len, bucket.blocks)
        is_held |= (shapes[:, 1:] <= sizes).all(axis=1)
    shapes, weights = shapes[is_held], weights[is_held]
    more = [bucket for bucket in candidates if bucket not in chosen]
    room = min(num_buckets - len(chosen), len(more))
    if room <= 0 or not len(shapes):
        return chosen
    if room == len(more):
        return sorted([*chosen, *more])
    found = choose_buckets(
        shapes, weights, more, chosen, count=len(chosen) + room, cost=cost, max_seconds=_MAX_SECONDS
    )
    return sorted({*chosen, *found.buckets})


def _most_frequent(shapes: Shapes, weights: Weights) -> tuple[Shapes, Weights]:
    if len(shapes) <= _MAX_SHAPES:
        return shapes, weights
    most = np.sort(np.argsort(-weights, kind="stable")[:_MAX_SHAPES])
    return shapes[most], weights[most]


def _seconds(buckets: Sequence[Bucket], cost: ShapeCost) -> npt.NDArray[np.float64]:
    sizes = [(b.phase, b.batch, b.query_len, b.blocks) for b in buckets]
    return cost(*np.array(sizes, np.int64).reshape(-1, 4).T)


def _uncovered(buckets: Sequence[Bucket], limits: StepLimits) -> tuple[Bucket, ...]:
    """Return the smallest shapes of the phase that do not fit into these buckets."""
    phase = buckets[0].phase
    prompts, decodes = (buckets, ()) if phase is Phase.PREFILL else ((), buckets)
    report = prove(Catalog(prompts, decodes), limits)
    return tuple(shape for shape in report.uncovered if shape.phase is phase)
