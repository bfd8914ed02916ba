"""The libraries that know grammars. Only the files here import them, and only when they are used:
xgrammar takes seconds to import.
"""

from typing import Any, Protocol

from vllm.messages import Grammar, IntArray
from vllm.structured_output.vocabulary import Vocabulary

BACKENDS = ("xgrammar", "llguidance")

MAX_WHITESPACE = 16
"""Characters of whitespace between two tokens of JSON. Without a bound, a model may write nothing
else until its output is full."""


class BackendError(ValueError):
    """A library refuses a grammar, or an output that does not follow it; the message is its own."""


class BackendMatcher(Protocol):
    """The state of one output in its grammar."""

    def fill(self, mask: IntArray) -> None:
        """Write the mask of the tokens that are allowed next.

        Args:
            mask: [num_words] of the vocabulary. The bits of tokens without text mean nothing.
        """
        ...

    def is_complete(self) -> bool:
        """The output may end here. Called after `fill`."""
        ...

    def accept(self, token_id: int) -> None:
        """A token of text was generated; BackendError when it cannot come here."""
        ...


class LoadedGrammar(Protocol):
    """A compiled grammar in memory."""

    def matcher(self) -> BackendMatcher:
        """A new one at the beginning of an output."""
        ...


class Backend(Protocol):
    """One library, for one vocabulary."""

    def compile(
        self,
        kind: str,
        source: Any,
        *,
        any_whitespace: bool = True,
        whitespace_pattern: str | None = None,
    ) -> bytes:
        """The content of a `Grammar`.

        Args:
            kind: of `GrammarSpec`.
            source: a prepared schema; a translated pattern; a list of choices; the text of a
                grammar; a structural tag in the newer format.
            any_whitespace: JSON may have whitespace where it needs none.
            whitespace_pattern: what it may have there; None is the default.

        Raises:
            BackendError: it does not know the kind, or refuses the source.
        """
        ...

    def load(self, content: bytes) -> LoadedGrammar:
        """Of what `compile` returned, here or elsewhere; BackendError when it cannot be used."""
        ...


def make_backend(name: str, vocabulary: Vocabulary) -> Backend:
    """The library of this name; imports it."""
    assert name in BACKENDS
    if name == "xgrammar":
        from vllm.structured_output.backends.xgrammar import XGrammarBackend

        return XGrammarBackend(vocabulary)
    from vllm.structured_output.backends.llguidance import LLGuidanceBackend

    return LLGuidanceBackend(vocabulary)


def check_vocabulary(grammar: Grammar, vocabulary: Vocabulary) -> None:
    """Raise BackendError when a grammar was compiled for another vocabulary."""
    if grammar.vocabulary_key != vocabulary.key:
        raise BackendError(
            "the grammar is for another tokenizer than the engine's own: structured output "
            "cannot be used after set_tokenizer"
        )
