"""Wrap the grammar libraries. Only the files here import them, and only when needed, because
xgrammar takes seconds to import.
"""

from collections.abc import Callable

from vllm.messages import Grammar
from vllm.structured_output.backends.interface import Backend, BackendError
from vllm.structured_output.backends.vocabulary import Vocabulary

BACKENDS = ("xgrammar", "llguidance")


def import_backend(name: str) -> "Callable[[Vocabulary], Backend]":
    """Import a grammar library, and return the function that creates its backend."""
    assert name in BACKENDS
    if name == "xgrammar":
        from vllm.structured_output.backends.xgrammar import XGrammarBackend

        return XGrammarBackend
    from vllm.structured_output.backends.llguidance import LLGuidanceBackend

    return LLGuidanceBackend


def make_backend(name: str, vocabulary: Vocabulary) -> Backend:
    """Import a grammar library and create its backend.

    The libraries hold the interpreter lock meanwhile: for 128,000 tokens xgrammar a tenth of a
    second, llguidance half a second.
    """
    return import_backend(name)(vocabulary)


def check_vocabulary(grammar: Grammar, vocabulary: Vocabulary) -> None:
    """Raise BackendError if a grammar was compiled for another vocabulary."""
    if grammar.vocabulary_key != vocabulary.key:
        raise BackendError(
            "the grammar is for another tokenizer than the engine's own: structured output "
            "cannot be used after set_tokenizer"
        )
