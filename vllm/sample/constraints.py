"""Apply logit_bias, bad_words and min_tokens: add values to the logits of some tokens.

Each request has a few (token, value) pairs; a banned token gets -inf. Constraints that may cover
the whole vocabulary are in `masks`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from vllm.messages import EngineRequest, FloatArray, IntArray
from vllm.sample.buffers import ToDevice

_BAN = -np.inf
_MAX_BIAS = 1e30
"""Larger ones force the token as well, but would be infinite as float32."""


class BiasTable:
    """Bias and banned tokens of a request, prepared for all its steps. Immutable.

    Args:
        request: request whose `logit_bias` token ids are inside the vocabulary.
        vocab_size: stop tokens and bad words outside of it cannot be generated and are ignored.

    Attributes:
        always: token ids, and the values to add to their logits in every step.
        early: token ids and values to use while the output has fewer than `min_tokens` tokens.
        min_tokens: 0 if end tokens are never banned.
        last_tokens: all tokens of a bad word except the last -> banned last tokens.
        prefix_lengths: last token of such a prefix -> lengths of the prefixes that end with it.
    """

    def __init__(self, request: EngineRequest, vocab_size: int) -> None:
        params = request.sampling_params
        bias = params.logit_bias or {}
        words = [w for w in request.bad_words_token_ids if w and max(w) < vocab_size]
        single = {w[0] for w in words if len(w) == 1}
        ends = request.stop_token_ids | {request.eos_token_id}
        # With structured output, only the matcher decides about end tokens: an end token may be the
        # only token that it allows.
        self.min_tokens = params.min_tokens if params.guided_decoding is None else 0
        self.always = _pairs(bias, single)
        self.early = self.always
        if self.min_tokens:
            known_ends = {t for t in ends if t is not None and t < vocab_size}
            self.early = _pairs(bias, single | known_ends)
        self.last_tokens: dict[tuple[int, ...], set[int]] = {}
        lengths: dict[int, set[int]] = {}
        for *prefix, last in words:
            if prefix:
                self.last_tokens.setdefault(tuple(prefix), set()).add(last)
                lengths.setdefault(prefix[-1], set()).add(len(prefix))
        self.prefix_lengths = {token_id: sorted(found) for token_id, found in lengths.items()}
        self.max_prefix = max(map(len, self.last_tokens), default=0)

    def banned_after(self, tail: list[int]) -> set[int]:
        """Return the last tokens of the bad words whose other tokens are the end of this output.

        This needs one look-up per prefix length, however many bad words there are.
        """
        found = [
            self.last_tokens.get(tuple(tail[-length:]))
            for length in self.prefix_lengths.get(tail[-1], ())
        ]
        return set().union(*filter(None, found))


class BiasTables:
    """Creates bias tables and keeps the newest one, because the samples of a request share it."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._last: tuple[EngineRequest, BiasTable] | None = None

    def get(self, request: EngineRequest) -> BiasTable:
        """Return the table of a request."""
        if self._last is None or not _have_same_bias(self._last[0], request):
            self._last = request, BiasTable(request, self._vocab_size)
        return self._last[1]


def _have_same_bias(one: EngineRequest, other: EngineRequest) -> bool:
    """Return whether both requests have the same parameter objects, so that their tables are
    equal.
    """
    a, b = one.sampling_params, other.sampling_params
    return (
        one.bad_words_token_ids is other.bad_words_token_ids
        and one.stop_token_ids is other.stop_token_ids
        and one.eos_token_id == other.eos_token_id
        and a.logit_bias is b.logit_bias
        and a.min_tokens == b.min_tokens
        and (a.guided_decoding is None) == (b.guided_decoding is None)
    )


class RowConstraints:
    """Bias and banned tokens of one request, with the end of its output, which bad words need.

    Args:
        table: bias table of the request.
        output_token_ids: tokens generated so far.
    """

    def __init__(self, table: BiasTable, output_token_ids: Sequence[int]) -> None:
        self._table = table
        length = table.max_prefix
        self._tail = list(output_token_ids[-length:]) if length else []

    @property
    def is_empty(self) -> bool:
        """Whether the request never changes a logit."""
        table = self._table
        early = len(table.early[0]) if table.min_tokens else 0
        return not (len(table.always[0]) or early or table.last_tokens)

    @property
    def needs_output(self) -> bool:
        """Whether `record` must be called."""
        return bool(self._table.last_tokens)

    def record(self, token_id: int) -> None:
        """Record a generated token."""
        self._tail.append(token_id)
        del self._tail[: -self._table.max_prefix]

    def pairs(
        self, num_output_tokens: int, ahead: Sequence[int] = ()
    ) -> tuple[IntArray, FloatArray]:
        """Return distinct token ids [m], and the values to add to their logits [m].

        Args:
            num_output_tokens: number of tokens generated so far.
            ahead: the last of these tokens, if they are not recorded yet.
        """
        table = self._table
        pairs = table.early if num_output_tokens < table.min_tokens else table.always
        tail = [*self._tail, *ahead] if ahead and table.max_prefix else self._tail
        banned = table.banned_after(tail[-table.max_prefix :]) if tail else None
        if not banned:
            return pairs
        more = _pairs({}, banned)
        others = ~np.isin(pairs[0], more[0])
        token_ids = np.concatenate([pairs[0][others], more[0]])
        return token_ids, np.concatenate([pairs[1][others], more[1]])


@dataclass(frozen=True)
class LogitEdits:
    """Values to add to some logits of each request. E is the longest list in the batch."""

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
        to_device: ToDevice,
    ) -> "LogitEdits":
        """Build the edits from `pairs`: index in the batch -> token ids and values. Other requests
        are not changed.

        Args:
            num_rows: number of requests n.
            pairs: edits, none longer than `width`.
            width: E.
            to_device: copies an array to the device of the logits.
        """
        token_ids = np.zeros((num_rows, width), np.int32)
        values = np.zeros((num_rows, width), np.float32)
        for index, (row_token_ids, row_values) in pairs.items():
            token_ids[index, : len(row_token_ids)] = row_token_ids
            values[index, : len(row_values)] = row_values
        return cls(to_device(token_ids), to_device(values))

    def __getitem__(self, rows: Tensor) -> "LogitEdits":
        """Select the edits of requests [m] int64."""
        return LogitEdits(self.token_ids[rows], self.values[rows])

    def apply(self, logits: Tensor) -> None:
        """Add the values to logits [n, P] float32 in place."""
        logits.scatter_add_(-1, self.token_ids.long(), self.values)


def _pairs(bias: Mapping[int, float], banned: set[int]) -> tuple[IntArray, FloatArray]:
    values_of = {**bias, **dict.fromkeys(sorted(banned), _BAN)}
    token_ids = np.array(list(values_of), np.int32)
    values = np.array(list(values_of.values()), np.float64)
    # A bias below the range of float32 becomes -inf and bans the token.
    with np.errstate(over="ignore"):
        return token_ids, np.minimum(values, _MAX_BIAS).astype(np.float32)
