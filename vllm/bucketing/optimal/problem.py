"""The problem of choosing buckets as arrays: costs of shapes, and prices of candidates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vllm.bucketing.bucket import Bucket, Phase
from vllm.bucketing.optimal.certificate import Budget, Floats, Ints, Mask, ShapeCost
from vllm.bucketing.optimal.intervals import make_grid, make_intervals, mapped, snapped
from vllm.bucketing.optimal.shapes import covers_shapes, merged, single, sizes_of, split_factor
from vllm.bucketing.traffic import Shapes, Weights

_MAX_PAIRS = 1_000_000
"""Shapes times candidates of one problem; with more, neighbouring sizes are merged."""
_SPLIT_PADDING = 1.1
"""Likely padding of prefills that run one by one."""


@dataclass(frozen=True)
class Problem:
    """Costs of shapes in candidate buckets, and prices of candidates.

    The candidates [m] begin with the mandatory ones.
    """

    shapes: Ints
    """[n, 4] phase and sizes of each shape."""
    sizes: Ints
    """[m, 4] phase and sizes of each candidate."""
    covers: Mask
    """[n, m] whether a candidate is at least as large as a shape."""
    weights: Floats
    """[n] weight of each shape."""
    candidate_costs: Floats
    """[m] cost of one forward pass with each candidate."""
    prices: Floats
    """[m] price of each candidate."""
    num_mandatory: int
    room: float
    """Budget of the candidates that are not mandatory."""
    unbatched: Floats
    """[n] cost of one forward pass of each shape without a bucket of its own; infinity: it needs
    one."""

    @property
    def may_split(self) -> bool:
        """Whether some shapes may be split, so that no bucket has to cover them."""
        return bool(np.isfinite(self.unbatched).any())

    @cached_property
    def otherwise(self) -> Floats:
        """[n] weighted cost of each shape if no chosen bucket covers it.

        It is the cost of separate forward passes if the shape may be split; else more than any set
        that covers all shapes costs.
        """
        most = 2 * float(self.weights.sum()) * float(self.candidate_costs.max()) + 1e-300
        return np.minimum(most, self.weights * self.unbatched)

    @cached_property
    def costs(self) -> Floats:
        """[n, m] weighted cost of each shape in each candidate, at most `otherwise`.

        It is `otherwise` if the candidate does not cover the shape.
        """
        costs = np.minimum(self.weights[:, None] * self.candidate_costs, self.otherwise[:, None])
        return np.where(self.covers, costs, self.otherwise[:, None])

    def cost(self, chosen: Sequence[int]) -> float:
        """Return the cost of all shapes with these chosen candidates."""
        if not chosen:
            return float(self.otherwise.sum())
        return float(self.costs[:, chosen].min(1).sum())


def make_problems(
    shapes: Shapes,
    weights: Weights,
    candidates: Sequence[Bucket] | None,
    mandatory: list[Bucket],
    budget: Budget,
    cost: ShapeCost,
    may_split: bool,
) -> tuple[Problem, Problem | None]:
    """Make the problem, and the one for the lower bound if it is different."""
    required = sizes_of(mandatory)
    if candidates is not None:
        others = sizes_of(sorted(set(candidates) - set(mandatory)))
        sizes = np.concatenate([required, others])
        if not may_split:
            shapes, weights = snapped(shapes, weights, sizes)
        unbatched = _unbatched(shapes, cost) if may_split else None
        problem = _problem(shapes, weights, sizes, sizes, len(required), budget, cost, unbatched)
        return problem, None
    shapes, weights = merged(shapes, weights)
    tolerance = 0.0
    while True:
        upper, lower = make_intervals(shapes, weights, tolerance, cost)
        up_shapes, up_weights = merged(mapped(shapes, upper), weights)
        num_candidates = sum(
            math.prod(len({e for (of, _), e in ends.items() if of == phase}) for ends in upper[1:])
            for phase in np.unique(shapes[:, 0])
        )
        if num_candidates * len(up_shapes) <= _MAX_PAIRS or tolerance > 1:
            break
        tolerance = max(0.001, tolerance * 1.3)
    up, low = make_grid(up_shapes, upper, lower)
    up, low = (np.concatenate([required, grid]) for grid in (up, low))
    low_shapes, _ = merged(mapped(shapes, lower), weights)
    likely = low_unbatched = None
    if may_split:
        likely = _SPLIT_PADDING * _unbatched(up_shapes, cost)
        low_unbatched = _unbatched(low_shapes, cost)
    problem = _problem(up_shapes, up_weights, up, up, len(required), budget, cost, likely)
    if np.array_equal(up, low) and not may_split:
        return problem, None
    bound = _problem(up_shapes, up_weights, up, low, len(required), budget, cost, low_unbatched)
    return problem, bound


def _unbatched(shapes: Shapes, cost: ShapeCost) -> Floats:
    """Return [n] the cost of each shape if each of its requests runs separately, without
    padding.
    """
    return split_factor(shapes) * cost(*single(shapes).T)


def _problem(
    shapes: Ints,
    weights: Floats,
    sizes: Ints,
    priced_sizes: Ints,
    num_mandatory: int,
    budget: Budget,
    cost: ShapeCost,
    unbatched: Floats | None,
) -> Problem:
    """Make a problem in which candidates may be priced at other sizes than those they cover.

    Args:
        unbatched: [n] cost of shapes that may be split; None: none may be.
    """
    covers: Mask = covers_shapes(sizes, shapes)
    is_useful: Mask = np.array(covers.any(0))
    is_useful[:num_mandatory] = True
    sizes, priced_sizes, covers = sizes[is_useful], priced_sizes[is_useful], covers[:, is_useful]
    is_lost = ~covers.any(1) if unbatched is None else ~covers.any(1) & np.isinf(unbatched)
    if is_lost.any():
        phase, *rest = shapes[is_lost][0].tolist()
        raise ValueError(f"no candidate bucket covers {Bucket(Phase(phase), *rest)}")
    candidate_costs = np.asarray(cost(*priced_sizes.T), np.float64)
    prices = np.asarray(budget.price(*priced_sizes.T), np.float64)
    if not np.array_equal(priced_sizes, sizes):  # a larger bucket may be cheaper to warm up
        prices = np.minimum(prices, np.asarray(budget.price(*sizes.T), np.float64))
    room = budget.limit - float(prices[:num_mandatory].sum())
    if unbatched is None:
        unbatched = np.full(len(weights), np.inf)
    return Problem(
        shapes=shapes,
        sizes=sizes,
        covers=covers,
        weights=weights,
        candidate_costs=candidate_costs,
        prices=prices,
        num_mandatory=num_mandatory,
        room=room,
        unbatched=unbatched,
    )
