"""The grammars of the engine core: loaded when first used, kept for the next request."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from vllm.config import VllmConfig
from vllm.errors import RequestError
from vllm.logger import init_logger
from vllm.messages import EngineRequest, Grammar
from vllm.structured_output.backends import (
    BACKENDS,
    Backend,
    BackendError,
    BackendMatcher,
    LoadedGrammar,
    check_vocabulary,
    make_backend,
)
from vllm.structured_output.row_matcher import RowMatcher
from vllm.structured_output.vocabulary import Vocabulary
from vllm.transformers_utils.tokenizer import load_tokenizer

logger = init_logger(__name__)

_LOADED_PER_BYTE = 2
"""A grammar in memory, in bytes of its content. Roughly: xgrammar's is smaller, llguidance's
larger, but that one's content is small."""
_LOADED_BYTES = 2**18
"""Of every grammar, however small its content."""


class GrammarMatchers:
    """Makes the matchers of one engine core.

    Nothing is imported or loaded before the first grammar is used, or `preload` is called.

    Args:
        config: of the engine; has the tokenizer, and how much is kept.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._model = config.model
        self._cache_bytes = config.structured_output.grammar_cache_bytes
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._backends: dict[str, Backend] = {}
        self._loaded: OrderedDict[bytes, tuple[LoadedGrammar, int]] = OrderedDict()
        self._loaded_bytes = 0

    def preload(self) -> None:
        """Import the libraries and load the tokenizer in the background."""
        threading.Thread(target=self._preload, name="grammar-preload", daemon=True).start()

    def matcher(self, request: EngineRequest, output_token_ids: Sequence[int]) -> RowMatcher:
        """The matcher of a request; costs nothing yet.

        Args:
            request: whose `guided_decoding` is set.
            output_token_ids: generated before a preemption.
        """
        open_grammar = partial(self._open, request.grammar)
        return RowMatcher(request, output_token_ids, open_grammar)

    def _open(self, grammar: Grammar | None) -> tuple[Vocabulary, BackendMatcher]:
        if grammar is None:
            raise BackendError("its grammar was not compiled before it came to the engine core")
        with self._lock:
            vocabulary = self._ready_vocabulary()
            check_vocabulary(grammar, vocabulary)
            return vocabulary, self._load(grammar, vocabulary).matcher()

    def _load(self, grammar: Grammar, vocabulary: Vocabulary) -> LoadedGrammar:
        if grammar.key in self._loaded:
            self._loaded.move_to_end(grammar.key)
            return self._loaded[grammar.key][0]
        loaded = self._backend(grammar.backend, vocabulary).load(grammar.content)
        cost = _LOADED_BYTES + _LOADED_PER_BYTE * len(grammar.content)
        self._loaded[grammar.key] = loaded, cost
        self._loaded_bytes += cost
        while self._loaded_bytes > self._cache_bytes and len(self._loaded) > 1:
            _, (_, oldest_cost) = self._loaded.popitem(last=False)
            self._loaded_bytes -= oldest_cost
        return loaded

    def _ready_vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            vocab_size = self._model.resolved_arch.vocab_size
            self._vocabulary = Vocabulary.of(load_tokenizer(self._model), vocab_size)
        return self._vocabulary

    def _backend(self, name: str, vocabulary: Vocabulary) -> Backend:
        if name not in self._backends:
            self._backends[name] = make_backend(name, vocabulary)
        return self._backends[name]

    def _preload(self) -> None:
        try:
            with self._lock:
                vocabulary = self._ready_vocabulary()
                for name in BACKENDS:
                    self._backend(name, vocabulary)
        except (ImportError, RequestError) as error:
            logger.info("requests for structured output will fail: %s", error)
