"""The exact optimum for shapes that are a chain, by dynamic programming.

best[k][j], the least cost of the shapes up to candidate j with k candidates of which j is the last,
is the minimum over i < j of best[k - 1][i] + cost(j) * weight in (i, j]. This is the algorithm for
optimal clusters in one dimension (Gronlund et al., arXiv 1701.07204), with the cost of padding.
"""

import numpy as np

from vllm.bucketing.optimal.certificate import Floats, Ints
from vllm.bucketing.optimal.problem import Problem

_MAX_CHAIN = 2048
"""Limit of the shapes of a chain: the memory of the algorithm grows with their square."""


def solve_chain(problem: Problem) -> tuple[Ints, float] | None:
    """Solve a problem exactly if its shapes are a chain and all prices are 1; else return None.

    The shapes are a chain if each candidate covers exactly the first n of them, for some n.
    """
    covers, prices, num_mandatory = problem.covers, problem.prices, problem.num_mandatory
    if problem.may_split or not (prices == 1).all() or len(problem.weights) > _MAX_CHAIN:
        return None
    order = np.argsort(-covers.sum(1), kind="stable")  # most covered shapes first
    covers = covers[order]
    num_covered = covers.sum(0)
    if not (covers == (np.arange(len(order))[:, None] < num_covered)).all():
        return None
    is_mandatory = np.arange(len(prices)) < num_mandatory
    by_position = np.lexsort((problem.candidate_costs, num_covered))
    kept: list[int] = []
    least = np.inf
    # Drop a candidate that costs at least as much as one that covers more.
    for index in by_position[::-1].tolist():
        if is_mandatory[index] or problem.candidate_costs[index] < least:
            kept.append(index)
        if not is_mandatory[index]:
            least = min(least, problem.candidate_costs[index])
    chain = np.array(kept[::-1], np.int64)
    costs = problem.candidate_costs[chain]
    if (np.diff(costs) < 0).any():
        return None  # a mandatory candidate costs more than a larger candidate
    return _chain_optimum(problem, chain, num_covered[chain], problem.weights[order])


def _chain_optimum(
    problem: Problem, chain: Ints, positions: Ints, weights: Floats
) -> tuple[Ints, float] | None:
    """Choose from a chain of candidates that ascend in cost and in the shapes that they cover."""
    sums = np.concatenate([[0.0], np.cumsum(weights)])[positions]
    costs = problem.candidate_costs[chain]
    forced = chain < problem.num_mandatory
    size = len(chain)
    # Cost of going from -1 (no bucket yet) or bucket i to bucket j, without a mandatory candidate
    # in between.
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
