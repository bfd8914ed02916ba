"""Chooses buckets for a traffic, with a proof of how far from the best they can be.

Shapes p with weights w are given; a bucket covers the shapes that are not larger in any dimension,
and a shape pays the cost of the cheapest bucket that covers it. A number of buckets, or as many as
a budget of seconds or bytes allows, is chosen so that the cost is least: a p-median problem.

    one dimension    the shapes are a chain, and a dynamic programme is exact
    several          lower bound by Lagrangian relaxation of "each shape is served once": for any
                     multipliers u, sum(u) + the most negative of rho, as far as the budget goes, is
                     at most the optimum, where rho_j = sum over i of min(0, w_i c_j - u_i). Each
                     set that the bound visits, and one found greedily, is improved by exchanges of
                     one bucket for another until none helps; the cheapest is taken
    many shapes      neighbouring sizes share an interval. Buckets end at upper ends of intervals;
                     for the bound they are priced at the lower ends

It needs numpy only. It knows no engine: costs and prices are functions of the caller.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from vllm.bucketing.bucket import Bucket, Phase
from vllm.bucketing.traffic import Shapes, Weights

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

ShapeCost = Callable[[Ints, Ints, Ints, Ints], Floats]
"""Arrays of phase, batch, query length and blocks -> seconds of a forward pass of each. It never
falls when a size grows."""

_MAX_PAIRS = 1_000_000
"""Shapes times candidates of one problem; with more, neighbouring sizes are merged."""
_MAX_CHAIN = 2048
_SPLIT_ROUNDS = 3
_SPLIT_PADDING = 1.1
"""Likely padding of prefills that run one by one."""
_MAX_ROUNDS = 300
_ROUNDS_BEFORE_HALVING = 12
_MAX_VISITED = 8
"""Sets of the bound that are improved, the cheapest first."""
_BOUND_SHARE = 0.5
"""Fraction of the time that the lower bound may take; exchanges have the rest."""


@dataclass(frozen=True)
class Budget:
    """Most that buckets may cost together.

    Attributes:
        limit: of all, in the unit of the prices, mandatory buckets included.
        price: price of each bucket, from the arrays of `ShapeCost`, for example seconds of warm-up
            or bytes of graphs.
        unit: what an error calls it.
    """

    limit: float
    price: ShapeCost
    unit: str = "buckets"

    @classmethod
    def of_count(cls, count: int) -> "Budget":
        """Return the budget of a number of buckets."""
        return cls(count, lambda phase, *sizes: np.ones(len(phase)))


@dataclass(frozen=True)
class ChosenBuckets:
    """A set of buckets and its certificate."""

    buckets: tuple[Bucket, ...]
    """Ascending, mandatory ones included."""
    cost: float
    """Seconds of all shapes, padded to these buckets."""
    lower_bound: float
    """No set within the budget costs less."""
    unpadded: float
    """Cost of all shapes without padding."""

    @property
    def certificate(self) -> float:
        """Largest possible distance from the best set, relative to it; 0: it is the best."""
        return self.cost / self.lower_bound - 1 if self.lower_bound > 0 else 0.0

    @property
    def padding(self) -> float:
        """Cost of padding, relative to the cost without any."""
        return self.cost / self.unpadded - 1 if self.unpadded > 0 else 0.0

    @property
    def least_padding(self) -> float:
        """Padding that no set within the budget is below."""
        return max(0.0, self.lower_bound / self.unpadded - 1) if self.unpadded > 0 else 0.0

    def describe(self) -> str:
        """Return `16 decode buckets: 3.9 % padding; no 16 buckets can have less than 0.6 %`."""
        count = len(self.buckets)
        phases = {str(bucket.phase) for bucket in self.buckets}
        kind = f"{phases.pop()} " if len(phases) == 1 else ""
        return (
            f"{count} {kind}bucket{'s' * (count != 1)}: {_percent(self.padding)} padding; "
            f"no {count} bucket{'s' * (count != 1)} can have less than "
            f"{_percent(self.least_padding)}"
        )


def choose_buckets(
    shapes: Shapes,
    weights: Weights,
    candidates: Sequence[Bucket] | None = None,
    mandatory: Iterable[Bucket] = (),
    *,
    count: int | None = None,
    budget: Budget | None = None,
    cost: ShapeCost,
    may_split: bool = False,
    max_seconds: float = 10.0,
) -> ChosenBuckets:
    """Choose the buckets of least cost, within a number of buckets or another budget.

    Args:
        shapes: [n, 4] phase, batch, query length and blocks; of both phases, if one budget is for
            both.
        weights: [n] how often each of them occurs.
        candidates: buckets to choose from; None: any with sizes of the shapes.
        mandatory: buckets that are in every set.
        count: how many buckets, mandatory ones included.
        budget: what all of them may cost; instead of `count`.
        cost: of a padded forward pass.
        may_split: a prefill of several requests runs one by one if that costs less, or if no bucket
            covers it.
        max_seconds: after that, what was reached is returned. Its certificate holds.

    Raises:
        ValueError: the budget is below what the mandatory buckets take, or no set within it
            covers all shapes; the message names the least.
    """
    if (count is None) == (budget is None):
        raise ValueError("give either a count or a budget of buckets, not both")
    if not len(shapes):
        raise ValueError("at least one shape is needed to choose buckets for, got none")
    limit = Budget.of_count(count) if count is not None else budget
    assert limit is not None
    deadline = time.monotonic() + max_seconds
    required = sorted(set(mandatory))
    problem, bound_problem = _make_problems(
        shapes, weights, candidates, required, limit, cost, may_split
    )
    if problem.room < 0:
        raise ValueError(
            f"the mandatory {len(required)} buckets take {limit.limit - problem.room:g} "
            f"{limit.unit}, but the limit is {limit.limit:g}"
        )
    if bound_problem is None:
        chosen, lower = _solve(problem, deadline)
    else:
        chosen, _ = _solve(problem, deadline - _BOUND_SHARE * max_seconds)
        lower = _bound(bound_problem, deadline)
    exact = float(weights @ cost(*shapes.T))
    buckets = _buckets(problem.sizes[chosen])
    total = cost_of(buckets, shapes, weights, cost, may_split=may_split)
    for _ in range(_SPLIT_ROUNDS if may_split else 0):
        if time.monotonic() > deadline:
            break
        # The cost of running one by one depends on the set.
        unbatched = _split_factor(problem.shapes) * _least_costs(
            buckets, _single(problem.shapes), cost
        )
        problem = replace(problem, unbatched=unbatched)
        chosen, _ = _solve(problem, deadline)
        others = _buckets(problem.sizes[chosen])
        other_total = cost_of(others, shapes, weights, cost, may_split=True)
        if other_total >= total:
            break
        buckets, total = others, other_total
    if not np.isfinite(total):
        raise ValueError(
            f"found no set of buckets within {limit.limit:g} {limit.unit} that covers all shapes: "
            "make a bucket mandatory that covers the largest shape, or raise the limit"
        )
    assert lower <= total * (1 + 1e-6), f"the bound {lower} is above the cost {total} of a set"
    return ChosenBuckets(buckets, total, min(max(lower, exact), total), exact)


def cost_of(
    buckets: Sequence[Bucket],
    shapes: Shapes,
    weights: Weights,
    cost: ShapeCost,
    *,
    may_split: bool = False,
) -> float:
    """Return the cost of all shapes, each padded to the cheapest bucket that covers it.

    It is infinite if one is not covered. The arguments are as in `choose_buckets`.
    """
    least = _least_costs(buckets, shapes, cost)
    if may_split:
        least = np.minimum(
            least, _split_factor(shapes) * _least_costs(buckets, _single(shapes), cost)
        )
    return float(weights @ least)


def _least_costs(buckets: Sequence[Bucket], shapes: Shapes, cost: ShapeCost) -> Floats:
    """Return [n] the cost of the cheapest bucket of each shape."""
    sizes = _sizes(buckets)
    prices = cost(*sizes.T)
    least = np.full(len(shapes), np.inf)
    for size, price in sorted(
        zip(sizes.tolist(), prices.tolist(), strict=True), key=lambda x: x[1]
    ):
        covered = _covers(np.array([size], np.int64), shapes)[:, 0] & np.isinf(least)
        least[covered] = price
    return least


def _single(shapes: Shapes) -> Shapes:
    """Return the shapes of a request each."""
    found: Ints = shapes.copy()
    found[:, 1] = 1
    return found


def _split_factor(shapes: Shapes) -> Floats:
    """Return how many forward passes of one request are as much as each shape; infinity: it is no
    prefill of several."""
    is_split = (shapes[:, 0] == Phase.PREFILL) & (shapes[:, 1] > 1)
    return np.where(is_split, shapes[:, 1], np.inf)


# ---- the problem --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Problem:
    """Costs of shapes in candidates, and prices of candidates.

    The candidates [m] begin with the mandatory ones.
    """

    shapes: Ints
    """[n, 4]"""
    sizes: Ints
    """[m, 4] of each candidate."""
    covers: Mask
    """[n, m]"""
    weights: Floats
    """[n]"""
    candidate_costs: Floats
    """[m] of one forward pass."""
    prices: Floats
    """[m]"""
    num_mandatory: int
    room: float
    """Budget of the other candidates."""
    unbatched: Floats
    """[n] cost of one forward pass of each shape without a bucket of its own; infinity: it needs
    one."""

    @property
    def may_split(self) -> bool:
        """Whether some shapes need no bucket of their own."""
        return bool(np.isfinite(self.unbatched).any())

    @cached_property
    def otherwise(self) -> Floats:
        """[n] weighted cost of each shape if no bucket covers it: more than any set costs that
        covers all shapes, or the cost of a forward pass for each request."""
        most = 2 * float(self.weights.sum()) * float(self.candidate_costs.max()) + 1e-300
        return np.minimum(most, self.weights * self.unbatched)

    @cached_property
    def costs(self) -> Floats:
        """[n, m] weighted cost of each shape in each candidate; `otherwise` at most, and where it
        is not covered."""
        costs = np.minimum(self.weights[:, None] * self.candidate_costs, self.otherwise[:, None])
        return np.where(self.covers, costs, self.otherwise[:, None])


def _make_problems(
    shapes: Shapes,
    weights: Weights,
    candidates: Sequence[Bucket] | None,
    mandatory: list[Bucket],
    budget: Budget,
    cost: ShapeCost,
    may_split: bool,
) -> tuple[_Problem, _Problem | None]:
    """Return the problem, and the one for the bound where that is another one."""
    required = _sizes(mandatory)
    if candidates is not None:
        others = _sizes(sorted(set(candidates) - set(mandatory)))
        sizes = np.concatenate([required, others])
        if not may_split:
            shapes, weights = _snapped(shapes, weights, sizes)
        unbatched = _unbatched(shapes, cost) if may_split else None
        problem = _problem(shapes, weights, sizes, sizes, len(required), budget, cost, unbatched)
        return problem, None
    shapes, weights = _merged(shapes, weights)
    tolerance = 0.0
    while True:
        upper, lower = _intervals(shapes, weights, tolerance, cost)
        up_shapes, up_weights = _merged(_map(shapes, upper), weights)
        num_candidates = sum(
            math.prod(len({e for (of, _), e in ends.items() if of == phase}) for ends in upper[1:])
            for phase in np.unique(shapes[:, 0])
        )
        if num_candidates * len(up_shapes) <= _MAX_PAIRS or tolerance > 1:
            break
        tolerance = max(0.001, tolerance * 1.3)
    up, low = _grid(up_shapes, upper, lower)
    up, low = (np.concatenate([required, grid]) for grid in (up, low))
    low_shapes, _ = _merged(_map(shapes, lower), weights)
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
    """Return [n] the cost of each shape as forward passes of one request each, without padding."""
    return _split_factor(shapes) * cost(*_single(shapes).T)


def _problem(
    shapes: Ints,
    weights: Floats,
    sizes: Ints,
    priced_sizes: Ints,
    num_mandatory: int,
    budget: Budget,
    cost: ShapeCost,
    unbatched: Floats | None,
) -> _Problem:
    """Return a problem whose costs and prices are of other sizes than what covers.

    Args:
        unbatched: [n] cost of shapes that need no bucket of theirs; None: all need one.
    """
    covers: Mask = _covers(sizes, shapes)
    is_useful: Mask = np.array(covers.any(0))
    is_useful[:num_mandatory] = True
    sizes, priced_sizes, covers = sizes[is_useful], priced_sizes[is_useful], covers[:, is_useful]
    is_lost = ~covers.any(1) if unbatched is None else ~covers.any(1) & np.isinf(unbatched)
    if is_lost.any():
        phase, *rest = shapes[is_lost][0].tolist()
        raise ValueError(f"no candidate bucket covers {Bucket(Phase(phase), *rest)}")
    candidate_costs = np.asarray(cost(*priced_sizes.T), np.float64)
    prices = np.asarray(budget.price(*priced_sizes.T), np.float64)
    room = budget.limit - float(prices[:num_mandatory].sum())
    if unbatched is None:
        unbatched = np.full(len(weights), np.inf)
    return _Problem(
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


def _intervals(
    shapes: Ints, weights: Floats, tolerance: float, cost: ShapeCost
) -> tuple[list[dict[tuple[int, int], int]], list[dict[tuple[int, int], int]]]:
    """Return for each dimension the upper and the lower end of the interval of (phase, size).

    Within an interval the cost of an average shape grows by no more than the tolerance.
    """
    uppers: list[dict[tuple[int, int], int]] = [{} for _ in range(4)]
    lowers: list[dict[tuple[int, int], int]] = [{} for _ in range(4)]
    for phase in np.unique(shapes[:, 0]).tolist():
        of_phase = shapes[:, 0] == phase
        average = np.average(shapes[of_phase], axis=0, weights=weights[of_phase]).round()
        for column in range(1, 4):
            values = np.unique(shapes[of_phase, column])
            example = np.tile(average.astype(np.int64), (len(values), 1))
            example[:, column] = values
            grown = cost(*example.T)
            start = 0
            for index in range(1, len(values) + 1):
                is_inside = index < len(values) and tolerance > 0
                if is_inside and grown[index] <= grown[start] * (1 + tolerance):
                    continue
                low, high = int(values[start]), int(values[index - 1])
                for value in values[start:index].tolist():
                    uppers[column][phase, value], lowers[column][phase, value] = high, low
                start = index
    return uppers, lowers


def _map(shapes: Ints, ends: list[dict[tuple[int, int], int]]) -> Ints:
    """Return the shapes with each size replaced by the end of its interval."""
    found: Ints = shapes.copy()
    phases = shapes[:, 0].tolist()
    for column in range(1, 4):
        values = shapes[:, column].tolist()
        found[:, column] = [ends[column][key] for key in zip(phases, values, strict=True)]
    return found


def _grid(
    shapes: Ints,
    uppers: list[dict[tuple[int, int], int]],
    lowers: list[dict[tuple[int, int], int]],
) -> tuple[Ints, Ints]:
    """Return every combination of upper ends, and the same with the lower ends."""
    ups: list[Ints] = []
    lows: list[Ints] = []
    for phase in np.unique(shapes[:, 0]).tolist():
        ends = [
            sorted({(high, lowers[column][key]) for key, high in uppers[column].items()
                    if key[0] == phase})
            for column in range(1, 4)
        ]  # fmt: skip
        index = np.stack(np.meshgrid(*(np.arange(len(e)) for e in ends), indexing="ij"), -1)
        index = index.reshape(-1, 3)
        for found, end in ((ups, 0), (lows, 1)):
            columns = [np.full(len(index), phase)] + [
                np.array([pair[end] for pair in e])[index[:, c]] for c, e in enumerate(ends)
            ]
            found.append(np.stack(columns, 1).astype(np.int64))
    up, low = np.concatenate(ups), np.concatenate(lows)
    # A bucket is as small as what it covers: each of its sizes is one of a shape that it covers.
    covers = _covers(up, shapes)
    is_tight = np.ones(len(up), bool)
    for column in range(1, 4):
        largest = np.where(covers, shapes[:, column][:, None], -1).max(0)
        is_tight &= largest == up[:, column]
    tight_up: Ints = up[is_tight]
    tight_low: Ints = low[is_tight]
    return tight_up, tight_low


def _snapped(shapes: Ints, weights: Floats, sizes: Ints) -> tuple[Ints, Floats]:
    """Return the shapes rounded up to sizes of candidates: the same candidates cover them."""
    found = shapes.copy()
    for phase in np.unique(shapes[:, 0]):
        of_phase = shapes[:, 0] == phase
        for column in range(1, 4):
            values = np.unique(sizes[sizes[:, 0] == phase, column])
            index = np.searchsorted(values, shapes[of_phase, column])
            is_inside = index < len(values)
            rounded = shapes[of_phase, column].copy()
            rounded[is_inside] = values[index[is_inside]]
            found[of_phase, column] = rounded
    return _merged(found, weights)


def _merged(shapes: Ints, weights: Floats) -> tuple[Ints, Floats]:
    """Return each shape once, with the sum of its weights."""
    unique, index = np.unique(shapes, axis=0, return_inverse=True)
    sums = np.bincount(index.reshape(-1), np.asarray(weights, np.float64), minlength=len(unique))
    found: Ints = unique[sums > 0]
    return found, sums[sums > 0].astype(np.float64)


def _covers(sizes: Ints, shapes: Ints) -> Mask:
    """Return [n, m] whether each candidate [m, 4] covers each shape [n, 4]."""
    found: Mask = np.equal(shapes[:, None, 0], sizes[None, :, 0])
    for column in range(1, 4):
        found &= shapes[:, None, column] <= sizes[None, :, column]
    return found


# ---- solving it ---------------------------------------------------------------------------


def _solve(problem: _Problem, deadline: float) -> tuple[Ints, float]:
    """Return the candidates of the best set that was found, and the lower bound."""
    chain = _solve_chain(problem)
    if chain is not None:
        return chain
    search = _Search(problem, deadline)
    best = search.improved(search.greedy())
    found = search.bound(best)
    return np.array(sorted(found), np.int64), search.lower


def _bound(problem: _Problem, deadline: float) -> float:
    """Return the lower bound only."""
    chain = _solve_chain(problem)
    if chain is not None:
        return chain[1]
    search = _Search(problem, deadline)
    search.raise_bound(search.greedy(), deadline)
    return search.lower


def _solve_chain(problem: _Problem) -> tuple[Ints, float] | None:
    """Solve a problem of one dimension, or return None if it is not one.

    The shapes are a chain if each candidate covers the first of them, up to some number.
    """
    covers, prices, num_mandatory = problem.covers, problem.prices, problem.num_mandatory
    if problem.may_split or not (prices == 1).all() or len(problem.weights) > _MAX_CHAIN:
        return None
    order = np.argsort(-covers.sum(1), kind="stable")  # what more candidates cover comes first
    covers = covers[order]
    num_covered = covers.sum(0)
    if not (covers == (np.arange(len(order))[:, None] < num_covered)).all():
        return None
    is_mandatory = np.arange(len(prices)) < num_mandatory
    by_position = np.lexsort((problem.candidate_costs, num_covered))
    kept: list[int] = []
    least = np.inf
    for index in by_position[::-1].tolist():  # one that covers no more and costs as much is dropped
        if is_mandatory[index] or problem.candidate_costs[index] < least:
            kept.append(index)
        if not is_mandatory[index]:
            least = min(least, problem.candidate_costs[index])
    chain = np.array(kept[::-1], np.int64)
    costs = problem.candidate_costs[chain]
    if (np.diff(costs) < 0).any():
        return None  # a mandatory candidate costs more than a larger one
    return _chain_optimum(problem, chain, num_covered[chain], problem.weights[order])


def _chain_optimum(
    problem: _Problem, chain: Ints, positions: Ints, weights: Floats
) -> tuple[Ints, float] | None:
    """Choose from a chain of candidates, ascending in cost and in what they cover."""
    sums = np.concatenate([[0.0], np.cumsum(weights)])[positions]
    costs = problem.candidate_costs[chain]
    forced = chain < problem.num_mandatory
    size = len(chain)
    # from -1 (nothing open yet) or i to j, with no mandatory candidate between them
    before = np.concatenate([[0.0], sums])
    paid = costs[None, :] * (sums[None, :] - before[:, None])
    starts, ends = np.arange(-1, size)[:, None], np.arange(size)[None, :]
    num_forced = np.concatenate([[0], np.cumsum(forced)])
    skipped = num_forced[ends] - num_forced[starts + 1]
    paid[(starts >= ends) | (skipped > 0)] = np.inf
    num_steps = int(min(problem.room + problem.num_mandatory, size))
    best = np.full(size + 1, np.inf)
    best[0] = 0.0
    is_end = (positions == len(weights)) & (num_forced[-1] == num_forced[np.arange(size) + 1])
    least, path_end = np.inf, (-1, -1)
    parents: list[Ints] = []
    for step in range(num_steps):
        totals = best[:, None] + paid
        parent = totals.argmin(0)
        reached = totals[parent, np.arange(size)]
        parents.append(parent)
        ending = np.where(is_end, reached, np.inf)
        if ending.min() < least:
            least, path_end = float(ending.min()), (step, int(ending.argmin()))
        best = np.concatenate([[np.inf], reached])
    if not np.isfinite(least):
        return None
    step, index = path_end
    found = []
    while index >= 0:
        found.append(int(chain[index]))
        index = int(parents[step][index]) - 1
        step -= 1
    return np.array(sorted({*found, *range(problem.num_mandatory)}), np.int64), least


class _Search:
    """Finds sets and a bound for a problem of several dimensions.

    Args:
        problem: to solve.
        deadline: of `time.monotonic`.

    Attributes:
        lower: the bound.
    """

    def __init__(self, problem: _Problem, deadline: float) -> None:
        self._problem = problem
        self._deadline = deadline
        self._start = time.monotonic()
        self._mandatory = list(range(problem.num_mandatory))
        self._improved: dict[frozenset[int], list[int]] = {}
        self.lower = 0.0

    def cost(self, chosen: Sequence[int]) -> float:
        """Return the cost of a set."""
        if not chosen:
            return float(self._problem.otherwise.sum())
        return float(self._problem.costs[:, chosen].min(1).sum())

    def greedy(self, given: Sequence[int] = ()) -> list[int]:
        """Return the mandatory candidates, some others, and what saves most for its price."""
        problem = self._problem
        chosen = sorted({*self._mandatory, *given})
        room = problem.room - sum(problem.prices[j] for j in chosen if j >= problem.num_mandatory)
        least = problem.otherwise
        if chosen:
            least = problem.costs[:, chosen].min(1)
        is_open = np.zeros(len(problem.prices), bool)
        is_open[chosen] = True
        prices = np.maximum(problem.prices, 1e-12)
        while True:
            possible = ~is_open & (problem.prices <= room * (1 + 1e-12))
            if not possible.any():
                return chosen
            saved = np.maximum(0, least[:, None] - problem.costs).sum(0)
            saved[~possible] = 0
            index = int((saved / prices).argmax())
            if saved[index] <= 0:
                return chosen
            chosen.append(index)
            is_open[index] = True
            room -= problem.prices[index]
            least = np.minimum(least, problem.costs[:, index])

    def improved(self, chosen: Sequence[int]) -> list[int]:
        """Return a set after exchanges of one candidate for another, until none saves anything."""
        problem, current = self._problem, list(chosen)
        room = problem.room - float(problem.prices[current[problem.num_mandatory :]].sum())
        while len(current) > problem.num_mandatory and time.monotonic() < self._deadline:
            change, out, new = self._best_exchange(current, room)
            if change >= -1e-12 * self.cost(current):
                break
            room += problem.prices[current[out]] - problem.prices[new]
            current[out] = new
        return self.greedy(current) if room > 0 else current

    def _best_exchange(self, chosen: list[int], room: float) -> tuple[float, int, int]:
        """Return the change of the cost, the index in the set of what leaves, and what enters.

        All pairs in one pass: d1 and d2 are the cheapest and the second cheapest open candidate of
        each shape.
        """
        problem = self._problem
        costs = problem.costs
        of_open = costs[:, chosen]
        if len(chosen) > 1:
            two = np.argpartition(of_open, 1, axis=1)[:, :2]
            pair = np.take_along_axis(of_open, two, 1)
            nearest = two[np.arange(len(pair)), pair.argmin(1)]
            d1, d2 = pair.min(1), pair.max(1)
        else:
            nearest = np.zeros(len(of_open), np.int64)
            d1, d2 = of_open[:, 0], problem.otherwise
        saved = np.maximum(0, d1[:, None] - costs)
        order = np.argsort(nearest, kind="stable")
        owners, starts = np.unique(nearest[order], return_index=True)
        kept = np.maximum(0, d2[:, None] - costs) - saved
        lost = np.zeros((len(chosen), costs.shape[1]))
        lost[owners] = np.add.reduceat((d2 - d1)[order][:, None] - kept[order], starts, axis=0)
        change = lost - saved.sum(0)
        change[: problem.num_mandatory] = np.inf
        change[:, chosen] = np.inf
        allowed = room + problem.prices[chosen]
        change[problem.prices[None, :] > allowed[:, None] * (1 + 1e-12)] = np.inf
        out, new = np.unravel_index(change.argmin(), change.shape)
        return float(change[out, new]), int(out), int(new)

    def bound(self, best: list[int]) -> list[int]:
        """Raise the lower bound, and return the best of the given set and the sets that it
        visits."""
        until = self._start + _BOUND_SHARE * max(0.0, self._deadline - self._start)
        visited = self.raise_bound(best, until)
        upper = self.cost(best)
        for key in sorted(visited, key=lambda each: visited[each])[:_MAX_VISITED]:
            if time.monotonic() > self._deadline or upper - self.lower <= 1e-9 * upper:
                break
            other = self.improved(self.greedy(sorted(key)))
            if self.cost(other) < upper:
                best, upper = other, self.cost(other)
        return best

    def raise_bound(self, best: list[int], until: float) -> dict[frozenset[int], float]:
        """Raise the lower bound by subgradient steps.

        Args:
            best: a set that covers all shapes, the better the faster the steps.
            until: time at which they end.

        Returns:
            The sets that attain the bounds, and their costs.
        """
        problem = self._problem
        upper = self.cost(best)
        multipliers = problem.costs[:, best].min(1) if best else problem.costs.min(1)
        kept, step, idle = multipliers.copy(), 1.0, 0
        visited: dict[frozenset[int], float] = {}
        for _ in range(_MAX_ROUNDS):
            value, chosen, shares = self._relaxed(multipliers)
            if value > self.lower * (1 + 1e-6):
                self.lower, kept, idle = value, multipliers.copy(), 0
            else:
                self.lower = max(self.lower, value)
                idle += 1
            whole = [j for j, share in zip(chosen, shares, strict=True) if share >= 1]
            key = frozenset(whole)
            if key and key not in visited:
                visited[key] = self.cost(whole)
            if upper - self.lower <= 1e-9 * upper or time.monotonic() > until:
                break
            served = (problem.costs[:, chosen] < multipliers[:, None]) @ shares
            gradient = 1.0 - served
            length = float(gradient @ gradient)
            if length == 0:
                break  # each shape is served once: the set is the best one
            if idle == _ROUNDS_BEFORE_HALVING:
                step, idle, multipliers = step / 2, 0, kept.copy()
                if step < 1e-4:
                    break
                continue
            multipliers = multipliers + step * (upper * 1.0001 - value) / length * gradient
            multipliers = np.clip(multipliers, 0, problem.otherwise)
        return visited

    def _relaxed(self, multipliers: Floats) -> tuple[float, list[int], Floats]:
        """Return the bound of some multipliers, the candidates that attain it, and the fraction of
        each that is within the budget."""
        problem = self._problem
        rho = np.minimum(0, problem.costs - multipliers[:, None]).sum(0)
        density = rho / np.maximum(problem.prices, 1e-300)
        density[: problem.num_mandatory] = 0
        order = np.argsort(density, kind="stable")
        order = order[rho[order] < 0]
        order = order[order >= problem.num_mandatory]
        before = np.concatenate([[0.0], np.cumsum(problem.prices[order])])
        num = int(np.searchsorted(before[1:], problem.room * (1 + 1e-12), "right"))
        shares = np.ones(num)
        rest = problem.room - before[num]
        if num < len(order) and rest > 0:
            shares = np.append(shares, min(1.0, rest / problem.prices[order[num]]))
            if shares[-1] <= 1e-9:
                shares = shares[:-1]
        found = order[: len(shares)]
        value = float(multipliers.sum() + rho[: problem.num_mandatory].sum() + rho[found] @ shares)
        chosen = [*self._mandatory, *found.tolist()]
        return value, chosen, np.concatenate([np.ones(len(self._mandatory)), shares])


# ---- arrays of buckets --------------------------------------------------------------------


def _sizes(buckets: Sequence[Bucket]) -> Ints:
    return np.array([(b.phase, b.batch, b.query_len, b.blocks) for b in buckets], np.int64).reshape(
        -1, 4
    )


def _buckets(sizes: Ints) -> tuple[Bucket, ...]:
    return tuple(sorted({Bucket(Phase(phase), *rest) for phase, *rest in sizes.tolist()}))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
