"""Apply the rules of a model for its outputs: tokens that it never writes, and the order of time
tokens.

The rules belong to the distribution of the model: logits of forbidden tokens are -inf before any
sampling parameter is applied. Time tokens follow the rules of Whisper (Radford et al. 2022, arXiv
2212.04356).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm.messages import IntArray, OutputRules
from vllm.sample.restrictions.masks import WORD_BITS, TokenMasks, num_words

NO_TIMES = int(np.iinfo(np.int32).max)
"""Says, instead of the first token of time stamps, that there are no rules for them."""
_ALL_BITS = 2**WORD_BITS - 1


class RowRules:
    """The rules of one request, and the output so far, which decides the allowed next tokens.

    Args:
        rules: rules of the request.
        output_token_ids: tokens generated so far.
        vocab_size: vocabulary size of the logits.

    Attributes:
        first_time: the first time token; None: there are no rules for time tokens.
    """

    def __init__(
        self, rules: OutputRules, output_token_ids: Sequence[int], vocab_size: int
    ) -> None:
        self._rules = rules
        self._vocab_size = vocab_size
        self.first_time = rules.first_time
        self._usual = self._mask(rules.never)
        first = () if rules.written else rules.not_first
        self._first = self._mask((*rules.never, *first))
        self._output = [*rules.written, *output_token_ids] if self.needs_output else []

    @property
    def needs_output(self) -> bool:
        """Whether `record` must be called."""
        return self.first_time is not None

    def record(self, token_id: int) -> None:
        """Record a generated token."""
        if self.needs_output:
            self._output.append(token_id)

    def allowed(self, num_output_tokens: int, ahead: Sequence[int] = ()) -> IntArray:
        """Return the mask [W] of the next token; it must not be changed.

        Args:
            num_output_tokens: number of tokens generated so far.
            ahead: the last of these tokens, if they are not recorded yet.
        """
        usual = self._usual if num_output_tokens else self._first
        if self.first_time is None:
            return usual
        found = usual.copy()
        for start, end in self._forbidden([*self._output, *ahead], self.first_time):
            _forbid(found, start, end)
        return found

    def _forbidden(self, output: Sequence[int], first_time: int) -> list[tuple[int, int]]:
        """Return the ranges of tokens that may not follow an output."""
        rules, size = self._rules, self._vocab_size
        found = [(rules.end_of_times, size)]
        if not output:
            return [(0, first_time), (rules.end_of_first_times, size)]
        was_time = output[-1] >= first_time
        opens_pair = was_time and (len(output) < 2 or output[-2] >= first_time)
        newest = next((token for token in reversed(output) if token >= first_time), None)
        if newest is not None:
            closes_text = was_time and not opens_pair
            found.append((first_time, newest if closes_text else newest + 1))
        if opens_pair:
            found.append((first_time, size))
        elif was_time:
            found.append((0, rules.end))
        return found

    def _mask(self, forbidden: Sequence[int]) -> IntArray:
        bits = np.ones(num_words(self._vocab_size) * WORD_BITS, np.uint8)
        bits[np.array(forbidden, np.int64)] = 0
        return np.packbits(bits, bitorder="little").view(np.int32)


def _forbid(mask: IntArray, start: int, end: int) -> None:
    """Clear the bits of the tokens from `start` to before `end` in a mask."""
    if start >= end:
        return
    first, last = start // WORD_BITS, (end - 1) // WORD_BITS
    of_first = np.uint32(_ALL_BITS << start % WORD_BITS & _ALL_BITS)
    of_last = np.uint32(_ALL_BITS >> (WORD_BITS - 1 - (end - 1) % WORD_BITS))
    words = mask.view(np.uint32)
    if first == last:
        words[first] &= ~(of_first & of_last)
        return
    words[first] &= ~of_first
    words[first + 1 : last] = 0
    words[last] &= ~of_last


@dataclass(frozen=True)
class LogitRules:
    """The rules of m requests in a batch."""

    masks: TokenMasks
    """Tokens that may come."""
    first_times: Tensor | None = None
    """[m] int32 on the device, the first token of time stamps of each row; NO_TIMES: the row has no
    rules for them. A time stamp comes if all of them together are likelier than each other token.
    None: no row has."""

    def apply(self, logits: Tensor) -> Tensor:
        """Return logits [n, V] with -inf for forbidden tokens."""
        changed = logits.clone()
        self.masks.apply(changed)
        if self.first_times is None:
            return changed
        if logits.is_cpu:
            self._apply_on_host(changed, self.first_times)
            return changed
        self.apply_on_card(changed, self.first_times)
        return changed

    def _apply_on_host(self, logits: Tensor, first_times: Tensor) -> None:
        """Forbid text tokens for requests that must write a time token, in place, without copying
        logits.
        """
        for row, first in zip(self.masks.rows.tolist(), first_times.tolist(), strict=True):
            if first == NO_TIMES:
                continue
            scores = logits[row].float()
            if _times_win(scores[:first].amax(-1), scores[first:]):
                logits[row, :first] = -np.inf

    def apply_on_card(self, logits: Tensor, first_times: Tensor) -> None:
        """Apply the rules with operators whose shapes do not depend on values."""
        rows = self.masks.device_rows
        if rows is None:
            rows = torch.from_numpy(self.masks.rows).to(logits.device)
        chosen = logits.index_select(0, rows)
        token = torch.arange(chosen.shape[-1], dtype=torch.int32, device=logits.device)
        is_text, scores = token < first_times[:, None], chosen.float()
        text = scores.masked_fill(~is_text, -np.inf).amax(-1)
        wins = _times_win(text, scores.masked_fill(is_text, -np.inf))
        logits.index_copy_(0, rows, chosen.masked_fill(wins[:, None] & is_text, -np.inf))


def _times_win(text: Tensor, times: Tensor) -> Tensor:
    """Return [...] whether the time tokens with logits [..., n] are together more likely than the
    text token with the logit [...].
    """
    most = torch.maximum(text, times.amax(-1))
    total = torch.exp(times - most[..., None]).sum(-1)
    return total > torch.exp(text - most)
