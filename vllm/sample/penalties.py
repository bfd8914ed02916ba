"""Apply presence, frequency and repetition penalties to the tokens that a request has seen.

Only the logits of tokens in the prompt or the output change. So each request keeps a list of its
distinct tokens with their counts, which has a few thousand entries. A count per token of the
vocabulary would need a pass over the whole vocabulary for every request and step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm.messages import FloatArray, IntArray
from vllm.sample.buffers import ToDevice
from vllm.sample.features import Param

_MIN_WIDTH = 64


@dataclass(frozen=True)
class Penalties:
    """Tokens to penalise in one batch of n requests. T is the largest number of distinct tokens of
    a request.
    """

    token_ids: Tensor
    """[n, T] int32 distinct tokens; padding is the vocabulary size."""
    counts: Tensor
    """[n, T] float32 times each token was generated; 0 when it is in the prompt only."""

    @classmethod
    def build(cls, token_ids: IntArray, counts: FloatArray, to_device: ToDevice) -> "Penalties":
        """Create the penalties from arrays [n, T] on the host, which must not change afterwards.

        `to_device` copies an array to the device of the logits.
        """
        return cls(to_device(token_ids), to_device(counts))

    def __getitem__(self, rows: Tensor) -> "Penalties":
        """Select the penalties of requests [m] int64."""
        return Penalties(self.token_ids[rows], self.counts[rows])

    def apply(self, logits: Tensor, params: Tensor) -> None:
        """Apply the penalties to logits in place.

        Repetition divides positive and multiplies negative logits of tokens in the prompt or the
        output (CTRL, arXiv:1909.05858). Then frequency is subtracted for each time a token was
        generated, and presence once if it was generated.

        Args:
            logits: [n, P] float32. P is above the vocabulary size and the last column is -inf, so
                that padding changes nothing.
            params: [params, n] of the batch, in the order of `Param`.
        """
        token_ids = self.token_ids.long()
        values = logits.gather(-1, token_ids)
        repetition = params[Param.REPETITION_PENALTY][:, None]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= self.counts * params[Param.FREQUENCY_PENALTY][:, None]
        values -= (self.counts > 0).float() * params[Param.PRESENCE_PENALTY][:, None]
        logits.scatter_(-1, token_ids, values)


class TokenCounts:
    """Counts the distinct tokens of each request with penalties, on the host.

    Args:
        max_num_seqs: maximum number of requests.
        vocab_size: size of the vocabulary, which is also the id of padding.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._token_ids: IntArray = np.empty((max_num_seqs, 0), np.int32)
        self._counts: FloatArray = np.empty((max_num_seqs, 0), np.float32)
        self._columns: dict[int, dict[int, int]] = {}
        """row -> token id -> its column; columns from the number of tokens on are padding."""

    def add(
        self, row: int, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        """Start to count the tokens of a request.

        Args:
            row: batch index whose tokens are not counted yet.
            prompt_token_ids: listed with count 0.
            output_token_ids: listed and counted.
        """
        assert row not in self._columns
        output = dict(zip(*_distinct(output_token_ids), strict=True))
        # A prompt may contain ids beyond the vocabulary; an output never does.
        in_prompt = _distinct(prompt_token_ids)[0]
        known = [t for t in in_prompt if t not in output and t < self._vocab_size]
        self._columns[row] = {t: column for column, t in enumerate([*output, *known])}
        self._reserve(len(self._columns[row]))
        self._token_ids[row, : len(output) + len(known)] = [*output, *known]
        self._counts[row, : len(output)] = list(output.values())

    def remove(self, row: int) -> None:
        """Stop counting the tokens of a request."""
        width = len(self._columns.pop(row))
        self._token_ids[row, :width] = self._vocab_size
        self._counts[row, :width] = 0

    def record(self, row: int, token_id: int) -> None:
        """Count a generated token of a request."""
        columns = self._columns[row]
        column = columns.get(token_id)
        if column is None:
            column = columns[token_id] = len(columns)
            self._reserve(len(columns))
            self._token_ids[row, column] = token_id
        self._counts[row, column] += 1

    def max_distinct(self, rows: Sequence[int]) -> int:
        """Return the largest number of distinct tokens of these requests; requests that are not
        counted have none.
        """
        return max((len(self._columns[row]) for row in rows if row in self._columns), default=0)

    def gather(self, rows: IntArray, width: int) -> tuple[IntArray, FloatArray]:
        """Return token ids and counts [n, width] of requests; requests that are not counted have
        only padding.
        """
        self._reserve(width)
        return self._token_ids[rows, :width], self._counts[rows, :width]

    def gather_behind(
        self, rows: IntArray, ahead: Sequence[Sequence[int]], width: int
    ) -> tuple[IntArray, FloatArray]:
        """Return token ids and counts as `gather` does, with additional tokens of each entry
        counted as generated.

        Args:
            rows: [n] batch indices, which may repeat.
            ahead: n lists of additional tokens.
            width: at least the sum of `max_distinct` and the longest list, or the vocabulary size.
        """
        token_ids, counts = self.gather(rows, width)
        for index, (row, more) in enumerate(zip(rows.tolist(), ahead, strict=True)):
            if not more or row not in self._columns:
                continue
            columns, new = self._columns[row], dict[int, int]()
            for token_id in more:
                column = columns.get(token_id)
                if column is None:
                    column = new.setdefault(token_id, len(columns) + len(new))
                    token_ids[index, column] = token_id
                counts[index, column] += 1
        return token_ids, counts

    def _reserve(self, width: int) -> None:
        """Enlarge the arrays to `width` distinct tokens."""
        num_rows, have = self._token_ids.shape
        if width <= have:
            return
        more = max(_MIN_WIDTH, width, 2 * have) - have
        padding = np.full((num_rows, more), self._vocab_size, np.int32)
        self._token_ids = np.concatenate([self._token_ids, padding], 1)
        self._counts = np.concatenate([self._counts, np.zeros((num_rows, more), np.float32)], 1)


def _distinct(token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    values, counts = np.unique(np.asarray(token_ids, np.int32), return_counts=True)
    return values.tolist(), counts.tolist()
