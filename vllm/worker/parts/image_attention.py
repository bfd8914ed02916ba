"""Bidirectional attention within images: how far ahead each token of an image attends.

Each pipeline stage has this part, whether it encodes images or not.
"""

import numpy as np

from vllm.messages import IntArray, NewRequest
from vllm.utils.ragged import positions_within
from vllm.worker.batch.launch import Launch
from vllm.worker.parts.row_parts import RowPart


class ImageAttention(RowPart):
    """The images of the requests in the batch, by batch index.

    Args:
        num_rows: number of rows of the batch.
    """

    def __init__(self, num_rows: int) -> None:
        self._ends: IntArray = np.zeros(num_rows, np.int32)
        """[rows] index after the last token of an image of each row; 0: it has none."""
        self._runs: dict[int, list[tuple[int, int]]] = {}
        """Row of the batch -> (first index, number) of tokens that see each other."""

    def add(self, new: NewRequest) -> None:
        runs = [run for item in new.request.media for run in item.runs]
        if runs:
            self._runs[new.row] = runs
            self._ends[new.row] = max(map(sum, runs))

    def remove(self, row: int) -> None:
        if self._runs.pop(row, None) is not None:
            self._ends[row] = 0

    def last_keys(self, launch: Launch) -> IntArray | None:
        """Return the last key [T] that each token attends to, as an index in its request.

        None if no token attends to later ones.

        Args:
            launch: forward pass of T tokens, without padding.
        """
        start, count = launch.num_computed_tokens, launch.num_scheduled_tokens
        if not self._runs or not (start < self._ends[launch.rows]).any():
            return None
        last_keys = (np.repeat(start, count) + positions_within(count)).astype(np.int32)
        self.lengthen(launch, last_keys)
        return last_keys

    def piece_end(self, row: int, start: int, stop: int) -> int:
        """Return where a prompt chunk from `start` must end if it should end at `stop`.

        It must not end inside of an image: it ends before the image, or after it if the chunk would
        be empty.
        """
        for begin, count in self._runs.get(row, ()):
            if begin < stop < begin + count:
                return begin if begin > start else begin + count
        return stop

    def lengthen(self, launch: Launch, last_keys: IntArray) -> None:
        """Set the last key of image tokens to the end of their image.

        Args:
            launch: contains all tokens of an image that are not computed yet.
            last_keys: [T] own index of each token, padded like the forward pass; changed.
        """
        starts, ends = launch.starts, launch.num_computed_tokens + launch.num_scheduled_tokens
        has_some = launch.num_computed_tokens < self._ends[launch.rows]
        for index in np.flatnonzero(has_some).tolist():
            computed, end = int(launch.num_computed_tokens[index]), int(ends[index])
            first = int(starts[index]) - computed
            for begin, count in self._runs[int(launch.rows[index])]:
                if begin < end and begin + count > computed:
                    tokens = slice(first + max(begin, computed), first + begin + count)
                    last_keys[tokens] = begin + count - 1
