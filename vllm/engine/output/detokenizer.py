"""Decode tokens to text incrementally: never return a part of a character, nor a character
twice.
"""

import codecs
from collections.abc import Callable, Collection, Container, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from vllm.transformers_utils.special_tokens import SpecialTokens
from vllm.transformers_utils.token_bytes import ByteDecoding, TokenBytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNKNOWN = "\ufffd"
_MAX_INCOMPLETE = 3
"""Largest number of U+FFFD that an incomplete character decodes to: one per byte, and four bytes
are complete."""
_MAX_TABLES = 8
"""Sets of hidden tokens whose tables are kept; all parsers of a server need two or three."""
_CONTEXT_TOKENS = 8
"""Number of previous tokens that decide how the next one is joined, such as with a space."""


class Detokenizer(Protocol):
    """Converts the tokens of one sample to text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that is final now; empty while a character is
        incomplete.
        """
        ...

    def flush(self) -> str:
        """Return the remaining text at the end of the output. Incomplete bytes become U+FFFD."""
        ...


class ByteDetokenizer:
    """Detokenizer for tokenizers that decode by joining bytes.

    The text equals decoding all tokens at once, with one exception: if byte tokens of a
    SentencePiece tokenizer form invalid UTF-8, its decode turns every character of that run of byte
    tokens into U+FFFD, even complete ones that may have been shown. This class keeps the complete
    ones.

    Args:
        table: bytes of each token.
        errors: codec error handler.
        strips_first_space: the text has no beginning before it, and its first space is left out.
    """

    __slots__ = ("_decoder", "_is_complete", "_strip", "_table", "_texts")

    def __init__(self, table: TokenBytes, errors: str, strips_first_space: bool) -> None:
        self._table = table
        self._texts = table.texts
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)
        self._is_complete = True
        """Whether the bytes so far end with a complete character."""
        self._strip = strips_first_space

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that is final now."""
        if self._is_complete and len(token_ids) == 1 and not self._strip:
            whole = self._texts[token_ids[0]]
            if whole is not None:
                return whole
        table = self._table
        text = self._decoder.decode(b"".join([table[token_id] for token_id in token_ids]))
        self._is_complete = not self._decoder.getstate()[0]
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """Return the remaining text at the end of the output."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizer for any other tokenizer: decodes the last tokens again with each new one.

    Args:
        decode: token ids -> text; a token's text may depend on a few tokens before it.
        shown_ids: tokens that have text; other tokens are skipped.
        prompt_token_ids: tokens before the output.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        shown_ids: Container[int],
        prompt_token_ids: Sequence[int],
    ) -> None:
        self._decode = decode
        self._shown_ids = shown_ids
        # The end of a prompt has few special tokens (chat markers), so 64 tokens contain enough
        # others.
        end = [token_id for token_id in prompt_token_ids[-64:] if token_id in shown_ids]
        self._window = end[-_CONTEXT_TOKENS:]
        self._num_shown = len(decode(self._window))
        """Characters of the window's text that were shown, or belong to the prompt."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that is final now."""
        return "".join([self._push_one(t) for t in token_ids if t in self._shown_ids])

    def flush(self) -> str:
        """Return the remaining text at the end of the output."""
        return self._decode(self._window)[self._num_shown :]

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        num_held = min(_MAX_INCOMPLETE, len(text) - len(text.rstrip(_UNKNOWN)))
        end = len(text) - num_held
        new, self._num_shown = text[self._num_shown : end], max(self._num_shown, end)
        if len(self._window) > 2 * _CONTEXT_TOKENS:
            del self._window[:-_CONTEXT_TOKENS]
            num_dropped = len(text) - len(self._decode(self._window))
            self._num_shown = max(0, self._num_shown - num_dropped)
        return new


class DetokenizerFactory:
    """Creates detokenizers for one tokenizer, and caches the data that they share."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._special_ids = SpecialTokens.of(tokenizer).ids
        self._tables: dict[frozenset[int], TokenBytes] = {}
        """Hidden tokens -> the table without their text."""
        self._decoding = ByteDecoding.of(tokenizer.backend_tokenizer) if tokenizer.is_fast else None
        # Computed once, because transformers computes it again, slowly, at each call.
        is_general = self._decoding is None
        self._known_ids = frozenset(tokenizer.get_vocab().values() if is_general else ())

    def create(
        self,
        prompt_token_ids: Sequence[int] | None,
        *,
        skip_special_tokens: bool = True,
        kept_special_token_ids: Collection[int] = (),
        spaces_between_special_tokens: bool = True,
    ) -> Detokenizer:
        """Create a detokenizer for the output after a prompt.

        Args:
            prompt_token_ids: tokens of the prompt; its text is not part of the result. None:
                unknown.
            skip_special_tokens: leave special tokens out of the text.
            kept_special_token_ids: special tokens whose text is never left out.
            spaces_between_special_tokens: only has an effect with tokenizers written in Python.
        """
        hidden = self._special_ids.difference(kept_special_token_ids)
        if not skip_special_tokens:
            hidden = frozenset()
        if self._decoding is not None:
            table = self._table(hidden)
            is_start = (
                self._decoding.strips_first_space
                and prompt_token_ids is not None
                and not any(table[token_id] for token_id in prompt_token_ids)
            )
            errors = "replace" if self._decoding.is_byte_level else _PER_BYTE
            return ByteDetokenizer(table, errors, is_start)

        def decode(token_ids: list[int]) -> str:
            return self._decode(token_ids, spaces_between_special_tokens)

        return WindowDetokenizer(decode, self._known_ids - hidden, prompt_token_ids or ())

    def text_of(self, token_id: int) -> str:
        """Return the text of a single token, including special tokens; U+FFFD for part of a
        character.
        """
        text = self._texts.get(token_id)
        if text is None:
            if self._decoding is not None:
                text = self._table(frozenset())[token_id].decode(errors="replace")
            else:
                text = self._decode([token_id] if token_id in self._known_ids else [], True)
            self._texts[token_id] = text
        return text

    def _table(self, hidden: frozenset[int]) -> TokenBytes:
        assert self._decoding is not None
        if hidden not in self._tables:
            if len(self._tables) == _MAX_TABLES:
                del self._tables[next(iter(self._tables))]
            self._tables[hidden] = TokenBytes(
                self._tokenizer.backend_tokenizer,
                is_byte_level=self._decoding.is_byte_level,
                hidden=hidden,
            )
        return self._tables[hidden]

    def _decode(self, token_ids: list[int], spaces_between_special_tokens: bool) -> str:
        text = self._tokenizer.decode(
            token_ids,
            spaces_between_special_tokens=spaces_between_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return cast(str, text)


_PER_BYTE = "vllm.one_mark_per_byte"


def _one_mark_per_byte(error: UnicodeError) -> tuple[str, int]:
    """Replace each invalid byte by U+FFFD, as SentencePiece does. The codec's own handler replaces
    a whole sequence by one.
    """
    assert isinstance(error, UnicodeDecodeError)
    return _UNKNOWN * (error.end - error.start), error.end


codecs.register_error(_PER_BYTE, _one_mark_per_byte)
