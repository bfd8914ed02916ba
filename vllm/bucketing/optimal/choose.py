"""Chooses buckets with the algorithm that fits the problem, within a time limit."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from vllm.bucketing.bucket import Bucket
from vllm.bucketing.optimal.bound import Bound
from vllm.bucketing.optimal.certificate import Budget, ChosenBuckets, Ints, ShapeCost
from vllm.bucketing.optimal.chain import solve_chain
from vllm.bucketing.optimal.exchanges import Exchanges
from vllm.bucketing.optimal.problem import Problem, make_problems
from vllm.bucketing.optimal.shapes import (
    buckets_of,
    cost_of,
    least_costs,
    single,
    sizes_of,
    split_factor,
)
from vllm.bucketing.traffic import Shapes, Weights

_SPLIT_ROUNDS = 3
_MAX_VISITED = 8
"""Sets of the bound that are improved, the cheapest first."""
_BOUND_SHARE = 0.5
"""Fraction of the time that the lower bound may take; exchanges have the rest."""


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
        shapes: [n, 4] phase, batch, query length and blocks; of both phases, if they share one
            budget.
        weights: [n] how often each shape occurs.
        candidates: buckets to choose from; None: any combination of sizes of the shapes.
        mandatory: buckets that are always chosen.
        count: how many buckets, mandatory ones included.
        budget: limit of what all of them may cost; instead of `count`.
        cost: cost of a padded forward pass.
        may_split: a prefill of several requests may run as one forward pass per request, if that
            costs less, or if no bucket covers it.
        max_seconds: time limit; the best set until then is returned, with a valid certificate.

    Raises:
        ValueError: the budget is less than the price of the mandatory buckets, or no set within it
            covers all shapes; the message contains the smallest possible budget.
    """
    if (count is None) == (budget is None):
        raise ValueError("give either a count or a budget of buckets, not both")
    if not len(shapes):
        raise ValueError("at least one shape is needed to choose buckets for, got none")
    limit = Budget.of_count(count) if count is not None else budget
    assert limit is not None
    deadline = time.monotonic() + max_seconds
    required = sorted(set(mandatory))
    problem, bound_problem = make_problems(
        shapes, weights, candidates, required, limit, cost, may_split
    )
    if problem.room < 0:
        raise ValueError(
            f"the {len(required)} mandatory buckets take {limit.limit - problem.room:g} "
            f"{limit.unit}, but must take at most {limit.limit:g}"
        )
    if bound_problem is None:
        chosen, lower = _solve(problem, deadline)
    else:
        chosen, _ = _solve(problem, deadline - _BOUND_SHARE * max_seconds)
        lower = _bound(bound_problem, deadline)
    exact = float(weights @ cost(*shapes.T))
    buckets = buckets_of(problem.sizes[chosen])
    total = cost_of(buckets, shapes, weights, cost, may_split=may_split)
    for _ in range(_SPLIT_ROUNDS if may_split else 0):
        if time.monotonic() > deadline:
            break
        # The cost of running requests one by one depends on the chosen buckets.
        unbatched = split_factor(problem.shapes) * least_costs(
            buckets, single(problem.shapes), cost
        )
        problem = replace(problem, unbatched=unbatched)
        chosen, _ = _solve(problem, deadline)
        others = buckets_of(problem.sizes[chosen])
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
    spent = ""
    if budget is not None:
        price = float(budget.price(*sizes_of(buckets).T).sum())
        spent = f"{price:.3g} of {budget.limit:g} {budget.unit}"
    return ChosenBuckets(buckets, total, min(max(lower, exact), total), exact, spent)


def _solve(problem: Problem, deadline: float) -> tuple[Ints, float]:
    """Return the candidates of the best set that was found, and the lower bound."""
    chain = solve_chain(problem)
    if chain is not None:
        return chain
    start = time.monotonic()
    search, bound = Exchanges(problem, deadline), Bound(problem)
    best = search.improved(search.greedy())
    visited = bound.raise_until(best, start + _BOUND_SHARE * max(0.0, deadline - start))
    upper = problem.cost(best)
    for key in sorted(visited, key=lambda each: visited[each])[:_MAX_VISITED]:
        if time.monotonic() > deadline or upper - bound.lower <= 1e-9 * upper:
            break
        other = search.improved(search.greedy(sorted(key)))
        if problem.cost(other) < upper:
            best, upper = other, problem.cost(other)
    return np.array(sorted(best), np.int64), bound.lower


def _bound(problem: Problem, deadline: float) -> float:
    """Return only the lower bound of the cost."""
    chain = solve_chain(problem)
    if chain is not None:
        return chain[1]
    bound = Bound(problem)
    bound.raise_until(Exchanges(problem, deadline).greedy(), deadline)
    return bound.lower
