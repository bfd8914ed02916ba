"""Use llguidance: a lexer and Earley parser at run time. Supports most of JSON schema, and Lark
grammars.
"""

import json
import re
from typing import Any

import llguidance
import numpy as np

from vllm.messages import IntArray
from vllm.structured_output.backends.interface import MAX_WHITESPACE, BackendError
from vllm.structured_output.backends.vocabulary import Vocabulary

_REGEX_PROBLEM = re.compile(r"regex parse error:\n(.*)\n( *\^+)\nerror: (.*)")
"""The line of the pattern, marks under the wrong part, and the error."""


class _Tokens:
    """A vocabulary with the interface that llguidance needs. The last token is an artificial end
    token.
    """

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        # The library marks tokens that are not text with 0xFF, a byte that never occurs in UTF-8.
        self.tokens = [
            token or b"\xff<%d>" % token_id for token_id, token in enumerate(vocabulary.tokens)
        ]
        self.eos_token_id = len(self.tokens)
        self.tokens.append(b"\xff<end>")
        self.special_token_ids = [i for i, t in enumerate(self.tokens) if t.startswith(b"\xff")]
        self.tokenizer: llguidance.LLTokenizer | None = None

    def __call__(self, text: bytes) -> list[int]:
        """Tokenise a text that the grammar forces."""
        if self.tokenizer is None:
            # The library first calls without tokens, to find out whether bytes are accepted.
            return []
        return self.tokenizer.greedy_tokenize(text.decode())


class LLGuidanceBackend:
    """Compiles and loads grammars with llguidance."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = _Tokens(vocabulary)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(tokens), n_vocab=len(tokens.tokens)
        )
        tokens.tokenizer = self._tokenizer

    def compile(
        self,
        kind: str,
        source: Any,
        *,
        any_whitespace: bool = True,
        whitespace_pattern: str | None = None,
    ) -> bytes:
        """Compile the content of a `Grammar`; raises BackendError if the library refuses it."""
        options = json_options(any_whitespace, whitespace_pattern)
        try:
            grammar = self._grammar(kind, source, options)
        except (ValueError, AssertionError) as error:
            raise BackendError(_first_lines(str(error))) from None
        is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
            grammar, self._tokenizer
        )
        if is_error:
            raise BackendError(_first_lines(messages[0]))
        return grammar.encode()

    def _grammar(self, kind: str, source: Any, options: dict[str, Any]) -> str:
        matcher = llguidance.LLMatcher
        if kind == "json":
            return matcher.grammar_from_json_schema(json.dumps({**source, "x-guidance": options}))
        if kind == "regex":
            return matcher.grammar_from_regex(source)
        if kind == "choice":
            return matcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, source)))
        if kind == "lark":
            return matcher.grammar_from_lark(source)
        if kind == "structural_tag":
            return matcher.grammar_from_lark(_structural_tag(source, options))
        raise BackendError(f"llguidance does not support {kind} grammars")

    def load(self, content: bytes) -> "LLGuidanceGrammar":
        """Load a result of `compile`; raises BackendError if it cannot be used."""
        first = llguidance.LLMatcher(self._tokenizer, content.decode(), log_level=0)
        if first.is_error():
            raise BackendError(_first_lines(first.get_error()))
        return LLGuidanceGrammar(first, -(-self._tokenizer.vocab_size // 32))


class LLGuidanceGrammar:
    """A compiled grammar in memory."""

    def __init__(self, first: llguidance.LLMatcher, num_words: int) -> None:
        self._first = first
        self._num_words = num_words

    def matcher(self) -> "LLGuidanceMatcher":
        """Create a matcher at the beginning of an output."""
        return LLGuidanceMatcher(self._first.deep_copy(), self._num_words)


class LLGuidanceMatcher:
    """The state of one output in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, num_words: int) -> None:
        self._matcher = matcher
        self._words = np.empty(num_words, np.int32)

    def fill(self, mask: IntArray) -> None:
        """Write the mask of the tokens that are allowed next."""
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._check()
        mask[:] = self._words[: len(mask)]

    def is_complete(self) -> bool:
        """Return whether the output may end here. Valid only after `fill`."""
        return self._matcher.is_accepting()

    def can_accept(self, token_id: int) -> bool:
        """Return whether a text token may come next; the state does not change."""
        return bool(self._matcher.validate_tokens([token_id]))

    def accept(self, token_id: int) -> None:
        """Add a text token; raises BackendError if the grammar does not allow it."""
        if not self._matcher.consume_token(token_id):
            self._check()
            raise BackendError(f"token {token_id} is not allowed by the grammar")

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""
        self._matcher.rollback(num_tokens)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise BackendError(_first_lines(self._matcher.get_error()))


def json_options(any_whitespace: bool, whitespace_pattern: str | None) -> dict[str, Any]:
    """Return llguidance's options for the format of JSON."""
    if not any_whitespace:
        return {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    pattern = whitespace_pattern or rf"[ \t\n\r]{{1,{MAX_WHITESPACE}}}"
    return {"whitespace_flexible": True, "whitespace_pattern": pattern}


def _structural_tag(source: Any, options: dict[str, Any]) -> str:
    """Convert a structural tag {"format": {"type": "triggered_tags", ...}}, whose content is JSON
    schemas, to a Lark grammar.
    """
    tags = []
    for tag in source["format"]["tags"]:
        begin = tag["begin"]
        triggers = [t for t in source["format"]["triggers"] if begin.startswith(t)]
        if not triggers:
            raise BackendError(
                f"'triggers' must have a string with which the tag {begin!r} begins, got "
                f"{source['format']['triggers']}"
            )
        schema = {**tag["content"]["json_schema"], "x-guidance": options}
        tags.append(
            llguidance.StructTag(trigger=triggers[0], begin=begin, grammar=schema, end=tag["end"])
        )
    return llguidance.StructTag.to_grammar(tags, assume_special=False)


def _first_lines(message: str) -> str:
    """Return the error message without the state of the parser."""
    if found := _REGEX_PROBLEM.search(message):
        line, marks, problem = found.groups()
        start = marks.index("^")
        return f"{line[start : start + marks.count('^')]}: {problem}"
    return message.partition("<state>")[0].strip()[:1000] or "the grammar cannot be used"
