"""Groups of different sizes, concatenated in flat arrays."""

from typing import Any

import numpy as np
import numpy.typing as npt


def positions_within(counts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The position of each element in its group, for groups of these sizes.

    >>> positions_within(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    starts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) - np.repeat(starts, counts)
