"""Use xgrammar: a pushdown automaton compiled against the vocabulary. Fast; supports plain
schemas.
"""

import json
import re
from typing import Any

import numpy as np
import xgrammar

from vllm.messages import IntArray
from vllm.structured_output.backends.interface import MAX_WHITESPACE, BackendError
from vllm.structured_output.backends.vocabulary import Vocabulary

_LOG_PREFIX = re.compile(r"^(?:\[[\d:]+\] \S+?:\d+: )+")


class XGrammarBackend:
    """Compiles and loads grammars with xgrammar."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        # An additional, artificial end token after the model's tokens.
        end = len(vocabulary.tokens)
        self._info = xgrammar.TokenizerInfo(
            [*vocabulary.tokens, b""],
            xgrammar.VocabType.RAW,
            vocab_size=end + 1,
            stop_token_ids=[end],
        )
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        self._scratch_words = -(-(end + 1) // 32)

    def compile(
        self,
        kind: str,
        source: Any,
        *,
        any_whitespace: bool = True,
        whitespace_pattern: str | None = None,
    ) -> bytes:
        """Compile the content of a `Grammar`; raises BackendError if the library refuses it."""
        if whitespace_pattern is not None:
            raise BackendError("xgrammar does not support a whitespace pattern")
        try:
            compiled = self._compile(kind, source, any_whitespace)
        except (RuntimeError, ValueError, TypeError) as error:
            raise BackendError(_message(error)) from None
        return compiled.serialize_json().encode()

    def _compile(self, kind: str, source: Any, any_whitespace: bool) -> Any:
        if kind == "json":
            return self._compiler.compile_json_schema(
                json.dumps(source),
                any_whitespace=any_whitespace,
                max_whitespace_cnt=MAX_WHITESPACE if any_whitespace else None,
                strict_mode=False,
            )
        if kind == "regex":
            return self._compiler.compile_regex(source)
        if kind == "choice":
            choices = " | ".join(f'"{_escaped(choice)}"' for choice in source)
            return self._compiler.compile_grammar(f"root ::= {choices}")
        if kind == "ebnf":
            return self._compiler.compile_grammar(source)
        if kind == "structural_tag":
            return self._compiler.compile_structural_tag(json.dumps(source))
        raise BackendError(f"xgrammar does not support {kind} grammars")

    def load(self, content: bytes) -> "XGrammar":
        """Load a result of `compile`; raises BackendError if it cannot be used."""
        try:
            compiled = xgrammar.CompiledGrammar.deserialize_json(content.decode(), self._info)
        except (RuntimeError, ValueError) as error:
            raise BackendError(_message(error)) from None
        return XGrammar(compiled, self._scratch_words)


class XGrammar:
    """A compiled grammar in memory."""

    def __init__(self, compiled: Any, num_words: int) -> None:
        self._compiled = compiled
        self._num_words = num_words

    def matcher(self) -> "XGrammarMatcher":
        """Create a matcher at the beginning of an output."""
        return XGrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._num_words)


class XGrammarMatcher:
    """The state of one output in its grammar."""

    def __init__(self, matcher: Any, num_words: int) -> None:
        self._matcher = matcher
        self._words = np.empty(num_words, np.int32)

    def fill(self, mask: IntArray) -> None:
        """Write the mask of the tokens that are allowed next."""
        try:
            self._matcher.fill_next_token_bitmask(self._words[None])
        except RuntimeError as error:
            raise BackendError(_message(error)) from None
        mask[:] = self._words[: len(mask)]

    def is_complete(self) -> bool:
        """Return whether the output may end here. Valid only after `fill`."""
        return bool(self._matcher.is_completed())

    def can_accept(self, token_id: int) -> bool:
        """Return whether a text token may come next; the state does not change."""
        if not self._matcher.accept_token(token_id):
            return False
        self._matcher.rollback(1)
        return True

    def accept(self, token_id: int) -> None:
        """Add a text token; raises BackendError if the grammar does not allow it."""
        if not self._matcher.accept_token(token_id):
            raise BackendError(f"token {token_id} is not allowed by the grammar")

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""
        self._matcher.rollback(num_tokens)


def _escaped(text: str) -> str:
    return "".join(
        c if c == " " or (c.isascii() and c.isalnum()) else f"\\U{ord(c):08X}" for c in text
    )


def _message(error: Exception) -> str:
    """Return the text of a library's error without its source location."""
    return _LOG_PREFIX.sub("", str(error)).strip() or repr(error)
