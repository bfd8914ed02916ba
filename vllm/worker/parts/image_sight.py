"""The last keys of tokens: a token of an image sees to the end of its image, if the model needs it.

Each stage of a pipeline has this part, whether it encodes images or not.
"""

import numpy as np

from vllm.messages import IntArray, NewRequest
from vllm.utils.ragged import positions_within
from vllm.worker.batch.launch import Launch
from vllm.worker.parts.row_parts import RowPart


class ImageSight(RowPart):
    """The images of the requests in the batch, by row.

    Args:
        num_rows: of the batch.
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
        """Return the last key [T] that each token of a launch sees, as an index in its request;
        None: its own.

        Args:
            launch: of T tokens, without padding.
        """
        start, count = launch.num_computed_tokens, launch.num_scheduled_tokens
        if not self._runs or not (start < self._ends[launch.rows]).any():
            return None
        last_keys = (np.repeat(start, count) + positions_within(count)).astype(np.int32)
        self.lengthen(launch, last_keys)
        return last_keys

    def piece_end(self, row: int, start: int, stop: int) -> int:
        """Return where a piece of a prompt from `start` ends that should end at `stop`: not inside
        of an image, so before it, or after an image that is longer than the piece."""
        for begin, count in self._runs.get(row, ()):
            if begin < stop < begin + count:
                return begin if begin > start else begin + count
        return stop

    def lengthen(self, launch: Launch, last_keys: IntArray) -> None:
        """Let the tokens of images see to the end of their image.

        Args:
            launch: all tokens of an image that are not computed yet are in it.
            last_keys: [T] own index of each token, padded as the launch is; changed.
        """
        starts, ends = launch.starts, launch.num_computed_tokens + launch.num_scheduled_tokens
        has_some = launch.num_computed_tokens < self._ends[launch.rows]
        for place in np.flatnonzero(has_some).tolist():
            computed, end = int(launch.num_computed_tokens[place]), int(ends[place])
            first = int(starts[place]) - computed
            for begin, count in self._runs[int(launch.rows[place])]:
                if begin < end and begin + count > computed:
                    tokens = slice(first + max(begin, computed), first + begin + count)
                    last_keys[tokens] = begin + count - 1
