"""What a request forbids or favours token by token: logit_bias, bad_words, min_tokens.

Bias and bans are a few (token, value) pairs per row, added to the logits; a ban adds -inf. What may
be about the whole vocabulary is in `masks`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm.messages import EngineRequest, FloatArray, IntArray

_BAN = -np.inf
_MAX_BIAS = 1e30
"""Larger ones force the token as well, but would be infinite as float32."""


class RowConstraints:
    """Bias and bans of one request, and as much of its output as bad words need.

    Args:
        request: whose `logit_bias` token ids are inside the vocabulary.
        vocab_size: stop tokens and bad words outside of it can never come and are left out.
        output_token_ids: generated so far.
    """

    def __init__(
        self, request: EngineRequest, vocab_size: int, output_token_ids: Sequence[int]
    ) -> None:
        params = request.sampling_params
        bias = params.logit_bias or {}
        words = [w for w in request.bad_words_token_ids if w and max(w) < vocab_size]
        single = {w[0] for w in words if len(w) == 1}
        ends = request.stop_token_ids | {request.eos_token_id}
        # Where the output has a form, its end is the matcher's business: it may be the only token.
        self._min_tokens = params.min_tokens if params.guided_decoding is None else 0
        self._always = _pairs(bias, single)
        self._early = _pairs(bias, single | {t for t in ends if t is not None and t < vocab_size})
        self._words: dict[int, list[tuple[list[int], int]]] = {}
        """Last token before the banned one -> (all tokens before it, the banned one)."""
        for *prefix, last in words:
            if prefix:
                self._words.setdefault(prefix[-1], []).append((prefix, last))
        self._tail_len = max((len(w) - 1 for w in words), default=0)
        self._tail = list(output_token_ids[-self._tail_len :]) if self._tail_len else []

    @property
    def is_empty(self) -> bool:
        """It never changes a logit."""
        early = len(self._early[0]) if self._min_tokens else 0
        return not (len(self._always[0]) or early or self._words)

    @property
    def needs_output(self) -> bool:
        """`record` must be called."""
        return bool(self._words)

    def record(self, token_id: int) -> None:
        """A token was generated."""
        self._tail.append(token_id)
        del self._tail[: -self._tail_len]

    def pairs(self, num_output_tokens: int) -> tuple[IntArray, FloatArray]:
        """Token ids [m], each of them once, and what to add to their logits [m]."""
        pairs = self._early if num_output_tokens < self._min_tokens else self._always
        if not self._tail:
            return pairs
        banned = {
            last
            for prefix, last in self._words.get(self._tail[-1], ())
            if self._tail[-len(prefix) :] == prefix
        }
        if not banned:
            return pairs
        more = _pairs({}, banned)
        others = ~np.isin(pairs[0], more[0])
        token_ids = np.concatenate([pairs[0][others], more[0]])
        return token_ids, np.concatenate([pairs[1][others], more[1]])


@dataclass(frozen=True)
class LogitEdits:
    """Values to add to some logits of each row. E is the longest list of the launch."""

    token_ids: Tensor
    """[n, E] int32; padding is token 0."""
    values: Tensor
    """[n, E] float32; padding is 0."""

    @classmethod
    def build(
        cls,
        num_rows: int,
        pairs: Mapping[int, tuple[IntArray, FloatArray]],
        width: int,
        device: torch.device,
    ) -> "LogitEdits":
        """From index in the launch -> the row's pairs; other rows are left alone.

        Args:
            num_rows: n.
            pairs: none of them longer than `width`.
            width: E.
            device: for the tensors.
        """
        token_ids = np.zeros((num_rows, width), np.int32)
        values = np.zeros((num_rows, width), np.float32)
        for index, (row_token_ids, row_values) in pairs.items():
            token_ids[index, : len(row_token_ids)] = row_token_ids
            values[index, : len(row_values)] = row_values
        return cls(torch.from_numpy(token_ids).to(device), torch.from_numpy(values).to(device))

    def __getitem__(self, rows: Tensor) -> "LogitEdits":
        """Of some rows only; [m] int64."""
        return LogitEdits(self.token_ids[rows], self.values[rows])

    def apply(self, logits: Tensor) -> None:
        """Add to logits [n, P] float32 in place."""
        logits.scatter_add_(-1, self.token_ids.long(), self.values)


def _pairs(bias: Mapping[int, float], banned: set[int]) -> tuple[IntArray, FloatArray]:
    values_of = {**bias, **dict.fromkeys(sorted(banned), _BAN)}
    token_ids = np.array(list(values_of), np.int32)
    values = np.array(list(values_of.values()), np.float64)
    with np.errstate(over="ignore"):  # below float32 is -inf, which is a ban
        return token_ids, np.minimum(values, _MAX_BIAS).astype(np.float32)
