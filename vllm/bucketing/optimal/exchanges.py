"""Finds sets of buckets greedily, and improves them by exchanging one bucket for another.

Teitz and Bart (Operations Research 16, 1968) use these exchanges for the p-median problem. All
pairs are compared in one pass, as in Whitaker's fast interchange (INFOR 21, 1983).
"""

import time
from collections.abc import Sequence

import numpy as np

from vllm.bucketing.optimal.problem import Problem


class Exchanges:
    """Finds sets of candidates for a problem.

    Args:
        problem: problem to solve.
        deadline: time of `time.monotonic`, after which sets are not improved further.
    """

    def __init__(self, problem: Problem, deadline: float) -> None:
        self._problem = problem
        self._deadline = deadline
        self._mandatory = list(range(problem.num_mandatory))

    def greedy(self, given: Sequence[int] = ()) -> list[int]:
        """Return the mandatory candidates, the given ones, and then those that save most
        per price.
        """
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
        """Improve a set by exchanging one candidate for another, until no exchange saves
        anything.
        """
        problem, current = self._problem, list(chosen)
        room = problem.room - float(problem.prices[current[problem.num_mandatory :]].sum())
        while len(current) > problem.num_mandatory and time.monotonic() < self._deadline:
            change, out, new = self._best_exchange(current, room)
            if change >= -1e-12 * problem.cost(current):
                break
            room += problem.prices[current[out]] - problem.prices[new]
            current[out] = new
        return self.greedy(current) if room > 0 else current

    def _best_exchange(self, chosen: list[int], room: float) -> tuple[float, int, int]:
        """Return the best exchange: (change of the cost, index in the set that leaves, new
        candidate).

        All pairs are compared in one pass: d1 and d2 are the cheapest and the second cheapest
        chosen candidate of each shape.
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
