"""Define the interface of a grammar library: its backend, its grammars, and its error."""

from typing import Any, Protocol

from vllm.messages import IntArray

MAX_WHITESPACE = 16
"""Maximum number of whitespace characters between two tokens of JSON. Without it, a model may write
only whitespace until the end of its output."""


class BackendError(ValueError):
    """A library refuses a grammar, or an output that does not match it. Has the library's
    message.
    """


class OutputMatcher(Protocol):
    """Follows one output, and allows its next tokens."""

    def fill(self, mask: IntArray) -> None:
        """Write the mask of the tokens that are allowed next.

        Args:
            mask: [num_words] of the vocabulary. The bits of tokens without text are not defined.
        """
        ...

    def is_complete(self) -> bool:
        """Return whether the output may end here. Called after `fill`."""
        ...

    def accept(self, token_id: int) -> None:
        """Add a generated text token; raises BackendError if the grammar does not allow it."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""
        ...


class BackendMatcher(OutputMatcher, Protocol):
    """The state of one output in its grammar."""

    def can_accept(self, token_id: int) -> bool:
        """Return whether a text token may come next.

        It may be allowed although `fill` leaves it out, if the library would split a forced text
        into other tokens.
        """
        ...


class LoadedGrammar(Protocol):
    """A compiled grammar in memory."""

    def matcher(self) -> BackendMatcher:
        """Create a matcher at the beginning of an output."""
        ...


class Backend(Protocol):
    """One grammar library, for one vocabulary."""

    def compile(
        self,
        kind: str,
        source: Any,
        *,
        any_whitespace: bool = True,
        whitespace_pattern: str | None = None,
    ) -> bytes:
        """Compile the content of a `Grammar`.

        Args:
            kind: kind of grammar, as in `GrammarSpec`.
            source: depends on the kind: a prepared schema, a translated pattern, a list of choices,
                the text of a grammar, or a structural tag in the newer format.
            any_whitespace: JSON may have optional whitespace.
            whitespace_pattern: pattern for this whitespace; None: the default.

        Raises:
            BackendError: the library does not support the kind, or refuses the source.
        """
        ...

    def load(self, content: bytes) -> LoadedGrammar:
        """Load a result of `compile`, from this or another process; raises BackendError if it is
        not usable.
        """
        ...
