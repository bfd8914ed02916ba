"""The lower bound, by Lagrangian relaxation of "each shape is served once".

For any multipliers u, sum(u) plus the most negative values of rho that fit the budget is at most
the optimum, where rho_j = sum over i of min(0, w_i c_j - u_i) (Cornuejols, Fisher and Nemhauser,
Management Science 23, 1977). Subgradient steps raise it (Held, Wolfe and Crowder, Mathematical
Programming 6, 1974).
"""

import time

import numpy as np

from vllm.bucketing.optimal.certificate import Floats
from vllm.bucketing.optimal.problem import Problem

_MAX_ROUNDS = 300
_ROUNDS_BEFORE_HALVING = 12


class Bound:
    """Computes a lower bound of the cost of a problem.

    Args:
        problem: problem of any number of dimensions.

    Attributes:
        lower: no set within the budget costs less.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._mandatory = list(range(problem.num_mandatory))
        self.lower = 0.0

    def raise_until(self, best: list[int], until: float) -> dict[frozenset[int], float]:
        """Raise the lower bound by subgradient steps.

        Args:
            best: a set that covers all shapes; the better it is, the faster the bound rises.
            until: time of `time.monotonic` at which to stop.

        Returns:
            The sets that attain the bounds, and their costs.
        """
        problem = self._problem
        upper = problem.cost(best)
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
                visited[key] = problem.cost(whole)
            if upper - self.lower <= 1e-9 * upper or time.monotonic() > until:
                break
            served = (problem.costs[:, chosen] < multipliers[:, None]) @ shares
            gradient = 1.0 - served
            length = float(gradient @ gradient)
            if length == 0:
                break  # each shape is covered exactly once, so this set is the best
            if idle == _ROUNDS_BEFORE_HALVING:
                step, idle, multipliers = step / 2, 0, kept.copy()
                if step < 1e-4:
                    break
                continue
            multipliers = multipliers + step * (upper * 1.0001 - value) / length * gradient
            multipliers = np.clip(multipliers, 0, problem.otherwise)
        return visited

    def _relaxed(self, multipliers: Floats) -> tuple[float, list[int], Floats]:
        """Compute the bound for given multipliers.

        Return it with the candidates that attain it, and the fraction of each that is within the
        budget.
        """
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
