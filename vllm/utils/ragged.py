"""Handle groups of different sizes that are concatenated in flat arrays."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt


def positions_within(counts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the index of each element in its group, for groups with these sizes.

    >>> positions_within(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    starts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) - np.repeat(starts, counts)


def split_spans(
    counts: npt.NDArray[np.int32], limit: int
) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]]:
    """Split spans of tokens into forward passes of at most `limit` tokens, in order.

    Yields for each forward pass the indices of its spans, the number of tokens of each span that
    ran before, and the number that run now.

    >>> [[x.tolist() for x in part] for part in split_spans(np.array([2, 3], np.int32), 4)]
    [[[0, 1], [0, 0], [2, 2]], [[1], [2], [1]]]
    """
    done = np.zeros_like(counts)
    while (rest := counts - done).any():
        take = np.clip(limit - (np.cumsum(rest) - rest), 0, rest).astype(np.int32)
        chosen = np.flatnonzero(take).astype(np.int32)
        yield chosen, done[chosen], take[chosen]
        done += take
