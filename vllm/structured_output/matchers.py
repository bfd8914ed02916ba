"""Load the grammars in the engine core at their first use, and cache them."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from vllm.config import VllmConfig
from vllm.errors import RequestError
from vllm.guided_decoding_params import GrammarStart
from vllm.logger import init_logger
from vllm.messages import EngineRequest, Grammar
from vllm.structured_output.backends import BACKENDS, check_vocabulary, import_backend, make_backend
from vllm.structured_output.backends.interface import Backend, BackendError, LoadedGrammar
from vllm.structured_output.backends.vocabulary import Vocabulary
from vllm.structured_output.row_matcher import RowMatcher
from vllm.transformers_utils.tokenizer import load_tokenizer
from vllm.utils.background_work import start_in_time_slices
from vllm.utils.imports import IMPORT_LOCK

logger = init_logger(__name__)

_LOADED_PER_BYTE = 2
"""Approximate memory of a loaded grammar per byte of its content. xgrammar needs less, llguidance
more, but its content is small."""
_LOADED_BYTES = 2**18
"""Additional memory of every loaded grammar."""


class GrammarMatchers:
    """Creates the matchers of one engine core.

    Importing a library takes up to a second, and loading a grammar up to a tenth. Both happen in
    separate threads before the request is scheduled (`prepare`). Thread-safe.

    Args:
        config: config of the engine; has the tokenizer and the size of the cache.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._model = config.model
        self._has_requests_early = config.device.runs_with_server
        self._cache_bytes = config.structured_output.grammar_cache_bytes
        self._load_lock = threading.Lock()
        """Lock during imports and loading."""
        self._vocabulary: Vocabulary | None = None
        self._is_exact = False
        """Whether the vocabulary was read from the tokenizer itself, not only from its file."""
        self._backends: dict[str, Backend] = {}
        self._has_weights = False
        self._lock = threading.Lock()
        """Protects the following members; never held for long."""
        self._loading: dict[bytes, Future[None]] = {}
        self._loaded: OrderedDict[bytes, tuple[LoadedGrammar, int]] = OrderedDict()
        self._loaded_bytes = 0

    def preload_while_loading(self) -> None:
        """Import the libraries and read the vocabulary in the background, if this is a server.

        Called when the weights begin to load: the process waits for the model's files then, and an
        import cannot delay any step.
        """
        if self._has_requests_early and self._model.pooler is None:
            start_in_time_slices(self._preload, "grammar-preload")

    def end_preload(self) -> None:
        """Record that the weights are loaded. Everything that is not preloaded yet and could delay
        steps is now loaded by the first request that needs it.
        """
        self._has_weights = True

    def prepare(self, request: EngineRequest) -> Future[None] | None:
        """Load the grammar of a request in the background, before it is scheduled.

        Returns:
            A future that is done when the grammar is loaded or has failed; its matcher then has the
            error. None: there is nothing to load.
        """
        grammar = request.grammar
        if grammar is None:
            return None
        guided = request.sampling_params.guided_decoding
        start = None if guided is None else guided.start
        with self._lock:
            if self._find(grammar) is not None and self._is_indexed(start):
                return None
            future = self._loading.get(grammar.key)
            if future is not None:
                return future
            future = self._loading[grammar.key] = Future()
        start_in_time_slices(partial(self._load_early, grammar, start, future), "grammar")
        return future

    def matcher(self, request: EngineRequest, output_token_ids: Sequence[int]) -> RowMatcher:
        """Create the matcher of a request. Its grammar is opened later.

        Args:
            request: request whose `guided_decoding` is set.
            output_token_ids: tokens generated before a preemption.
        """
        open_grammar = partial(self._open, request.grammar)
        return RowMatcher(request, output_token_ids, open_grammar)

    def _open(self, grammar: Grammar | None) -> tuple[Vocabulary, LoadedGrammar]:
        if grammar is None:
            raise BackendError(
                "the grammar of this request was not compiled before it was sent to the engine core"
            )
        with self._lock:
            loaded = self._find(grammar)
        # It was dropped from the cache since it was prepared, or cannot be loaded.
        if loaded is None:
            loaded = self._load(grammar)
        assert self._vocabulary is not None
        return self._vocabulary, loaded

    def _find(self, grammar: Grammar) -> LoadedGrammar | None:
        if grammar.key not in self._loaded:
            return None
        self._loaded.move_to_end(grammar.key)
        return self._loaded[grammar.key][0]

    def _is_indexed(self, start: GrammarStart | None) -> bool:
        return start is None or (
            self._vocabulary is not None and self._vocabulary.is_indexed(start.markers)
        )

    def _load_early(
        self, grammar: Grammar, start: GrammarStart | None, future: Future[None]
    ) -> None:
        try:
            self._load(grammar)
            if start is not None and self._vocabulary is not None:
                self._vocabulary.index(start.markers)
        # A library may raise anything: only this request fails, with the error of its matcher.
        except Exception as error:
            logger.debug("a grammar could not be loaded: %r", error)
        finally:
            with self._lock:
                del self._loading[grammar.key]
            future.set_result(None)

    def _load(self, grammar: Grammar) -> LoadedGrammar:
        with self._load_lock:
            vocabulary = self._ready_vocabulary()
            if grammar.vocabulary_key != vocabulary.key:
                vocabulary = self._exact_vocabulary()
            check_vocabulary(grammar, vocabulary)
            loaded = self._backend(grammar.backend, vocabulary).load(grammar.content)
        self._keep(grammar, loaded)
        return loaded

    def _keep(self, grammar: Grammar, loaded: LoadedGrammar) -> None:
        cost = _LOADED_BYTES + _LOADED_PER_BYTE * len(grammar.content)
        with self._lock:
            if grammar.key in self._loaded:
                return
            self._loaded[grammar.key] = loaded, cost
            self._loaded_bytes += cost
            while self._loaded_bytes > self._cache_bytes and len(self._loaded) > 1:
                _, (_, oldest_cost) = self._loaded.popitem(last=False)
                self._loaded_bytes -= oldest_cost

    def _ready_vocabulary(self) -> Vocabulary:
        """Return the vocabulary, from tokenizer.json if possible.

        Creating a tokenizer could delay a step, and nothing else in this process needs one.
        """
        if self._vocabulary is None:
            path = Path(self._model.tokenizer or self._model.resolved_path) / "tokenizer.json"
            self._vocabulary = Vocabulary.of_file(path, self._model.resolved_arch.vocab_size)
        return self._vocabulary or self._exact_vocabulary()

    def _exact_vocabulary(self) -> Vocabulary:
        """Return the vocabulary of the tokenizer itself. Backends for a different vocabulary are
        dropped.
        """
        if not self._is_exact:
            vocab_size = self._model.resolved_arch.vocab_size
            exact = Vocabulary.of(load_tokenizer(self._model), vocab_size)
            if self._vocabulary is None or self._vocabulary.key != exact.key:
                self._vocabulary = exact
                self._backends.clear()
            self._is_exact = True
        assert self._vocabulary is not None
        return self._vocabulary

    def _backend(self, name: str, vocabulary: Vocabulary) -> Backend:
        if name not in self._backends:
            self._backends[name] = make_backend(name, vocabulary)
        return self._backends[name]

    def _preload(self) -> None:
        try:
            with self._load_lock:
                with IMPORT_LOCK:
                    vocabulary = self._ready_vocabulary()
                    for name in BACKENDS:
                        import_backend(name)
                for name in BACKENDS:
                    if not self._has_weights:
                        self._backend(name, vocabulary)
        except (ImportError, RequestError) as error:
            logger.info("requests for structured output will fail: %s", error)
