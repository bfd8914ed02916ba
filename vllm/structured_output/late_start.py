"""Apply a grammar that begins later than the output: after reasoning, or never if tools are called.

`GrammarStart` describes what may come before. An output is in one of four phases:

    thoughts     any text; the answer begins after an end marker
    opening      a marker of thoughts or calls, or the grammar, whichever fits; white space before
                 it, where that is allowed
    grammar      the grammar decides
    calls        any text
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from vllm.guided_decoding_params import GrammarStart
from vllm.messages import IntArray
from vllm.structured_output.backends.interface import MAX_WHITESPACE, BackendError, BackendMatcher
from vllm.structured_output.backends.vocabulary import Vocabulary, pack_tokens

_MAX_ROLLBACK = 256
"""Number of earlier states to roll back to; more than a step has drafts."""


_StateT = TypeVar("_StateT")


class StateHistory(Generic[_StateT]):
    """Stores the last states of a matcher."""

    def __init__(self) -> None:
        self._states: list[_StateT] = []

    def add(self, state: _StateT) -> None:
        """Store the state before an accepted token."""
        self._states.append(state)
        if len(self._states) > 2 * _MAX_ROLLBACK:
            del self._states[:_MAX_ROLLBACK]

    def pop(self, num_tokens: int) -> _StateT:
        """Return the state before the last `num_tokens` tokens, and drop the later ones."""
        state = self._states[-num_tokens]
        del self._states[-num_tokens:]
        return state


class _Phase(IntEnum):
    THOUGHTS = 0
    OPENING = 1
    GRAMMAR = 2
    CALLS = 3


class _State(NamedTuple):
    """State of the output after a token: its phase and details."""

    phase: _Phase
    text: bytes = b""
    """In THOUGHTS, the end of the text, which may begin a marker. In OPENING, the text after white
    space."""
    num_spaces: int = 0
    """Bytes of white space before the answer."""
    pending: tuple[int, ...] = ()
    """Tokens of `text` in OPENING, which the grammar allows but has not been given."""
    fits_grammar: bool = True
    """OPENING: `text` may be the beginning of the grammar."""
    may_think: bool = False
    """OPENING: `text` may be the beginning of thoughts."""
    num_accepted: int = 0
    """Tokens that the matcher of the grammar has been given."""


class LateMatcher:
    """Follows one output as `GrammarStart` describes, with the matcher of its grammar.

    While the output is free, its masks allow tokens without text as well.

    Args:
        start: what may come before the grammar.
        vocabulary: vocabulary of the output.
        grammar: matcher at the beginning of the answer.
        text: text of the reasoning before the first token, which may end with the beginning of a
            marker.
    """

    def __init__(
        self,
        start: GrammarStart,
        vocabulary: Vocabulary,
        grammar: BackendMatcher,
        text: bytes = b"",
    ) -> None:
        self._vocabulary = vocabulary
        self._grammar = grammar
        self._special = {i: text.encode() for i, text in start.special_tokens.items()}
        self._thought_starts = [text.encode() for text in start.thought_starts]
        self._ends = [text.encode() for text in start.thought_ends]
        self._calls = [text.encode() for text in start.calls]
        self._max_spaces = MAX_WHITESPACE if start.allows_space else 0
        self._late_calls = [text.encode() for text in start.calls_in_thoughts]
        self._keep = max(map(len, self._ends + self._late_calls), default=1) - 1
        self._scratch = np.empty(vocabulary.num_words, np.int32)
        self._free: IntArray | None = None
        self._state = (
            self._think(text)
            if start.is_thinking
            else _State(_Phase.OPENING, may_think=bool(start.thought_starts))
        )
        self._history = StateHistory[_State]()

    @property
    def is_free(self) -> bool:
        """Whether any text is allowed now, because the output is not inside the grammar."""
        return self._state.phase in (_Phase.THOUGHTS, _Phase.CALLS)

    # ---- the contract -------------------------------------------------------------------------

    def fill(self, mask: IntArray) -> None:
        """Write the mask of the next token, depending on the phase of the output."""
        state = self._state
        if state.phase is _Phase.GRAMMAR:
            self._fill_grammar(mask, ())
        elif state.phase is _Phase.CALLS:
            mask[:] = -1
        elif state.phase is _Phase.THOUGHTS:
            self._fill_thoughts(mask, state.text)
        else:
            self._fill_opening(mask, state)

    def is_complete(self) -> bool:
        """Return whether the output may end: never inside reasoning, always inside calls."""
        state = self._state
        if state.phase is _Phase.CALLS:
            return True
        if state.phase is _Phase.THOUGHTS or not state.fits_grammar:
            return False
        if not state.pending:
            return self._grammar.is_complete()
        with _Given(self._grammar, state.pending):
            # Some matchers only report the end after they have computed the next mask.
            self._grammar.fill(self._scratch)
            return self._grammar.is_complete()

    def accept(self, token_id: int) -> None:
        """Add a token; raises BackendError if it is not allowed here."""
        state = self._after(token_id)
        self._history.add(self._state)
        self._state = state

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens, in the grammar as well."""
        state = self._history.pop(num_tokens)
        if num_extra := self._state.num_accepted - state.num_accepted:
            self._grammar.rollback(num_extra)
        self._state = state

    # ---- reading ------------------------------------------------------------------------------

    def _after(self, token_id: int) -> _State:
        """Return the state after a token. Tokens that turn out to belong to the grammar are passed
        to it.
        """
        state = self._state
        if state.phase is _Phase.GRAMMAR:
            self._grammar.accept(token_id)
            return state._replace(num_accepted=state.num_accepted + 1)
        if state.phase is _Phase.CALLS:
            return state
        data = self._special.get(token_id) or self._bytes_of(token_id)
        if state.phase is _Phase.THOUGHTS:
            return self._think(state.text + data)
        return self._open(state, token_id, data)

    def _think(self, text: bytes) -> _State:
        """Return the state inside reasoning that ends with this text."""
        markers = self._ends + self._late_calls
        found = [(place, marker) for marker in markers if (place := text.find(marker)) >= 0]
        if not found:
            return _State(_Phase.THOUGHTS, text[-self._keep :] if self._keep else b"")
        place, end = min(found)
        if end in self._late_calls:
            return _State(_Phase.CALLS)
        rest = text[place + len(end) :]
        if self._is_answer(rest):
            raise BackendError(
                f"a token must not have text after the end of thoughts, got {rest!r}"
            )
        return _State(_Phase.OPENING, num_spaces=len(rest))

    def _open(self, state: _State, token_id: int, data: bytes) -> _State:
        """Return the state after a token with which an answer or reasoning may begin."""
        if not state.text and self._is_space(data, state.num_spaces):
            return state._replace(num_spaces=state.num_spaces + len(data))
        if not data:
            raise BackendError(f"token {token_id} has no text, so no answer can begin with it")
        text = state.text + (data if state.text or not self._max_spaces else data.lstrip())
        if state.may_think:
            for start in self._thought_starts:
                if text.startswith(start):
                    return self._think(text[len(start) :])
        if any(text.startswith(call) for call in self._calls):
            return _State(_Phase.CALLS)
        fits = state.fits_grammar and self._allows(token_id, state.pending)
        is_marker = any(marker.startswith(text) for marker in self._markers(state))
        if not fits and not is_marker:
            raise BackendError(f"token {token_id} is not allowed at the beginning of the answer")
        pending = (*state.pending, token_id)
        if is_marker:
            return state._replace(
                text=text, pending=pending if fits else (), fits_grammar=fits, num_accepted=0
            )
        for each in pending:
            self._grammar.accept(each)
        return _State(_Phase.GRAMMAR, num_accepted=len(pending))

    def _markers(self, state: _State) -> list[bytes]:
        return self._calls + self._thought_starts if state.may_think else self._calls

    def _allows(self, token_id: int, pending: Sequence[int]) -> bool:
        """Return whether the grammar allows a token after the `pending` tokens, which it has not
        got yet.
        """
        if not self._bytes_of(token_id):
            return False
        with _Given(self._grammar, pending):
            return self._grammar.can_accept(token_id)

    def _bytes_of(self, token_id: int) -> bytes:
        tokens = self._vocabulary.tokens
        return tokens[token_id] if token_id < len(tokens) else b""

    def _is_space(self, data: bytes, num_before: int) -> bool:
        return bool(data) and not data.strip() and num_before + len(data) <= self._max_spaces

    def _is_answer(self, rest: bytes) -> bool:
        """Return whether the rest of a token after the end of reasoning must follow the grammar."""
        return bool(rest.strip() if self._max_spaces else rest)

    # ---- masks --------------------------------------------------------------------------------

    def _fill_grammar(self, mask: IntArray, pending: Sequence[int]) -> None:
        with _Given(self._grammar, pending):
            self._grammar.fill(mask)
        mask &= self._vocabulary.text_mask

    def _fill_thoughts(self, mask: IntArray, text: bytes) -> None:
        """Allow all tokens that do not contain both the end of the reasoning and the beginning of
        an answer, because a half token cannot be passed to the grammar.
        """
        if self._free is None:
            banned = [
                token_id
                for end in self._ends
                for token_id, rest in self._vocabulary.tokens_around(end)
                if self._is_answer(rest)
            ]
            self._free = ~self._pack(banned)
        mask[:] = self._free
        banned = []
        for end in self._ends:
            for length in range(1, len(end)):
                if text.endswith(end[:length]):
                    rest = end[length:]
                    banned += [
                        token_id
                        for token_id, token in self._vocabulary.tokens_along(rest)
                        if self._is_answer(token[len(rest) :])
                    ]
        if banned:
            mask &= ~self._pack(banned)

    def _fill_opening(self, mask: IntArray, state: _State) -> None:
        allowed = [
            token_id for m in self._markers(state) for token_id in self._steps(m, state.text)
        ]
        if not state.text:
            allowed += [
                token_id
                for token_id, token in self._vocabulary.spaces
                if self._is_space(token, state.num_spaces)
            ]
        if state.fits_grammar:
            self._fill_grammar(mask, state.pending)
        else:
            mask[:] = 0
        mask |= self._pack(allowed)

    def _steps(self, marker: bytes, text: bytes) -> Iterator[int]:
        """Yield the tokens that continue a text towards a marker, or beyond it."""
        if not marker.startswith(text):
            return
        rest = marker[len(text) :]
        # A token may begin with the white space before a word.
        for space in (b"", b" ", b"\n") if self._max_spaces and not text else (b"",):
            for token_id, token in self._vocabulary.tokens_along(space + rest):
                if token != space:
                    yield token_id
        for token_id, token in self._special.items():
            if token and (token.startswith(rest) or rest.startswith(token)):
                yield token_id

    def _pack(self, token_ids: Sequence[int]) -> IntArray:
        return pack_tokens(np.array(token_ids, np.int64), self._vocabulary.num_words)


class _Given:
    """Passes some more tokens to a matcher inside the context, and takes them back afterwards."""

    def __init__(self, matcher: BackendMatcher, token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._token_ids = token_ids

    def __enter__(self) -> None:
        for token_id in self._token_ids:
            self._matcher.accept(token_id)

    def __exit__(self, *_: object) -> None:
        if self._token_ids:
            self._matcher.rollback(len(self._token_ids))
