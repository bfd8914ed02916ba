"""Count the output tokens that belong to the reasoning, by their text.

The count depends on the tokens and on the characters that a reasoning parser found to be reasoning,
not on the pieces in which the output arrived. So a stream and a whole answer report the same
number.
"""

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from vllm.entrypoints.openai.shared.logprob_formats import bytes_of_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ThoughtTokens:
    """Maps the tokens of one output to positions in its text.

    If the tokenizer does not work on bytes, the positions are computed from the texts of single
    tokens, and may be off by a few characters.

    Args:
        tokenizer: tokenizer of the model.
        skipped: tokens that the text leaves out.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", skipped: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._bytes_of = bytes_of_tokens(tokenizer) or self._encoded_text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0
        self._ends: list[float] = []
        """Position at which each token ends, in characters; inside of a character it is a half."""

    def add(self, token_ids: Sequence[int]) -> None:
        """Add new tokens of the output."""
        for token_id in token_ids:
            if token_id not in self._skipped:
                self._num_characters += len(self._decoder.decode(self._bytes_of(token_id)))
            is_inside = bool(self._decoder.getstate()[0])
            self._ends.append(self._num_characters + is_inside / 2)

    def count(self, spans: Sequence[tuple[int, int]]) -> int:
        """Return the number of tokens with characters in any of the spans.

        Args:
            spans: (start, end) in characters of the output, in order.
        """
        total = counted = 0
        for start, end in spans:
            first = max(bisect_right(self._ends, start), counted)
            counted = max(min(bisect_left(self._ends, end) + 1, len(self._ends)), first)
            total += counted - first
        return total

    def _encoded_text(self, token_id: int) -> bytes:
        return str(self._tokenizer.decode([token_id])).encode()
