"""Apply a grammar to the tool calls inside an answer: free text, a marker, a call, free text, and
so on.

`GrammarStart.grammar_starts` has the markers. `LateMatcher` handles free text before a marker like
reasoning before an answer. So each call has its own `LateMatcher`, with a new matcher for the same
grammar.
"""

from typing import NamedTuple

import msgspec
import numpy as np

from vllm.guided_decoding_params import GrammarStart
from vllm.messages import IntArray
from vllm.structured_output.backends.interface import LoadedGrammar
from vllm.structured_output.backends.vocabulary import Vocabulary
from vllm.structured_output.late_start import LateMatcher, StateHistory

_JSON_ENDS = (b"}", b"]")


class _Call:
    """The matcher of one call and the free text before it, and the number of tokens that it got."""

    def __init__(self, matcher: LateMatcher) -> None:
        self.matcher = matcher
        self.num_tokens = 0


class _State(NamedTuple):
    """State of the output after a token: the part that is being read."""

    call: _Call | None
    """None: thoughts, or the beginning of an output that may have them."""
    num_tokens: int = 0
    """Tokens that `call` was given."""
    text: bytes = b""
    """Text before `call`: the output so far, or only its end inside of thoughts."""
    is_thinking: bool = False


class CallMatcher:
    """Follows one output whose tool calls must be JSON objects or arrays that match a grammar.

    The output may end anywhere outside a call. Calls inside reasoning are not restricted.

    Args:
        start: description of the output, with `grammar_starts`.
        vocabulary: vocabulary of the output.
        grammar: grammar of one call, or of one list of calls.
    """

    def __init__(self, start: GrammarStart, vocabulary: Vocabulary, grammar: LoadedGrammar) -> None:
        self._vocabulary = vocabulary
        self._grammar = grammar
        self._start_of_call = msgspec.structs.replace(
            start,
            is_thinking=True,
            thought_starts=(),
            thought_ends=start.grammar_starts,
            grammar_starts=(),
        )
        self._special = {i: text.encode() for i, text in start.special_tokens.items()}
        self._starts = tuple(text.encode() for text in start.thought_starts)
        self._ends = [text.encode() for text in start.thought_ends]
        self._keep = max(map(len, self._ends), default=1) - 1
        self._scratch = np.empty(vocabulary.num_words, np.int32)
        has_thoughts = bool(start.is_thinking or start.thought_starts)
        self._state = _State(
            None if has_thoughts else self._next_call(), is_thinking=start.is_thinking
        )
        self._history = StateHistory[_State]()

    def fill(self, mask: IntArray) -> None:
        """Write the mask of the next token. Outside calls all tokens are allowed, except one that
        contains a marker and the beginning of a call.
        """
        if self._state.call is None:
            mask[:] = -1
        else:
            self._state.call.matcher.fill(mask)

    def is_complete(self) -> bool:
        """Return whether the output may end: anywhere outside a call."""
        call = self._state.call
        return call is None or call.matcher.is_free

    def accept(self, token_id: int) -> None:
        """Add a token; raises BackendError if a call cannot continue with it."""
        state = self._after(token_id)
        self._history.add(self._state)
        self._state = state

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens, in the matcher of the call as well."""
        state = self._history.pop(num_tokens)
        call = state.call
        if call is not None and (num_extra := call.num_tokens - state.num_tokens):
            call.matcher.rollback(num_extra)
            call.num_tokens = state.num_tokens
        self._state = state

    def _after(self, token_id: int) -> _State:
        call = self._state.call
        if call is None:
            return self._read_thoughts(token_id)
        call.matcher.accept(token_id)
        call.num_tokens += 1
        if not call.matcher.is_free and self._bytes_of(token_id).rstrip().endswith(_JSON_ENDS):
            call.matcher.fill(self._scratch)  # some matchers only report the end after a fill
            if call.matcher.is_complete():
                return _State(self._next_call())
        return _State(call, call.num_tokens)

    def _read_thoughts(self, token_id: int) -> _State:
        """Return the state after a token of the reasoning, before the answer."""
        text = self._state.text + self._bytes_of(token_id)
        is_thinking = self._state.is_thinking
        if not is_thinking:
            begun = text.lstrip()
            if not begun or any(start.startswith(begun) for start in self._starts):
                is_thinking = begun in self._starts
                return _State(None, text=b"" if is_thinking else text, is_thinking=is_thinking)
            if not begun.startswith(self._starts):
                return _State(self._next_call(text))
        found = [(at, end) for end in self._ends if (at := text.find(end)) >= 0]
        if found:
            at, end = min(found)
            return _State(self._next_call(text[at + len(end) :]))
        return _State(None, text=text[-self._keep :] if self._keep else b"", is_thinking=True)

    def _next_call(self, text: bytes = b"") -> _Call:
        """Return a new call after this text of the answer, which may contain the beginning of its
        marker.
        """
        matcher = self._grammar.matcher()
        return _Call(LateMatcher(self._start_of_call, self._vocabulary, matcher, text))

    def _bytes_of(self, token_id: int) -> bytes:
        tokens = self._vocabulary.tokens
        known = tokens[token_id] if token_id < len(tokens) else b""
        return self._special.get(token_id) or known
