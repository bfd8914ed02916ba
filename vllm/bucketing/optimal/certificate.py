"""The budget of a choice of buckets, and the chosen set with its certificate."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm.bucketing.bucket import Bucket

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

ShapeCost = Callable[[Ints, Ints, Ints, Ints], Floats]
"""Arrays of phase, batch, query length and blocks -> seconds of a forward pass of each. It never
falls when a size grows."""


@dataclass(frozen=True)
class Budget:
    """The most that chosen buckets may cost together.

    Attributes:
        limit: maximum total of all, in the unit of the prices, mandatory buckets included.
        price: price of each bucket, from the arrays of `ShapeCost`, for example seconds of warm-up
            or bytes of graphs.
        unit: name of the unit in errors.
        name: the setting with the limit, for errors.
    """

    limit: float
    price: ShapeCost
    unit: str = "buckets"
    name: str = "budget"

    @classmethod
    def of_count(cls, count: int) -> "Budget":
        """Return a budget that limits the number of buckets."""
        return cls(count, lambda phase, *sizes: np.ones(len(phase)))


@dataclass(frozen=True)
class ChosenBuckets:
    """A chosen set of buckets, with a bound on its distance from the best set."""

    buckets: tuple[Bucket, ...]
    """Chosen buckets, ascending, mandatory ones included."""
    cost: float
    """Predicted seconds of all shapes, padded to these buckets."""
    lower_bound: float
    """Lower bound of the cost of all sets within the budget."""
    unpadded: float
    """Cost of all shapes without padding."""
    spent: str = ""
    """The part of the budget that the buckets take, such as "58.2 of 60 seconds"; empty: the budget
    is a count of buckets."""

    @property
    def certificate(self) -> float:
        """Largest possible distance from the best set, relative to its cost; 0: it is the best."""
        return self.cost / self.lower_bound - 1 if self.lower_bound > 0 else 0.0

    @property
    def padding(self) -> float:
        """Cost of padding, relative to the cost without padding."""
        return self.cost / self.unpadded - 1 if self.unpadded > 0 else 0.0

    @property
    def least_padding(self) -> float:
        """Lower bound of the padding of any set within the budget."""
        return max(0.0, self.lower_bound / self.unpadded - 1) if self.unpadded > 0 else 0.0

    def describe(self) -> str:
        """Return `16 decode buckets: 3.9 % padding; no 16 buckets can have less than 0.6 %`."""
        count = len(self.buckets)
        phases = {str(bucket.phase) for bucket in self.buckets}
        kind = f"{phases.pop()} " if len(phases) == 1 else ""
        spent, others = f" ({self.spent})" if self.spent else "", "set within the budget"
        if not self.spent:
            others = f"{count} bucket{'s' * (count != 1)}"
        return (
            f"{count} {kind}bucket{'s' * (count != 1)}{spent}: {_percent(self.padding)} padding; "
            f"no {others} can have less than {_percent(self.least_padding)}"
        )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
