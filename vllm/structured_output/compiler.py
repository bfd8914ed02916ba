"""Compile the structured output of a request to a `Grammar`, with a cache and a deadline."""

import queue
import threading
from collections import OrderedDict
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

import msgspec

from vllm.config import StructuredOutputConfig
from vllm.errors import CapacityError, RequestError
from vllm.guided_decoding_params import GuidedDecodingParams
from vllm.logger import init_logger
from vllm.messages import Grammar
from vllm.structured_output.backends.vocabulary import Vocabulary
from vllm.structured_output.spec import GrammarSpec, field_of, make_spec
from vllm.utils.background_work import start_in_time_slices
from vllm.utils.process.deadline_worker import (
    CallFailed,
    DeadlineExceeded,
    DeadlineWorker,
    WorkerError,
    make_server,
)
from vllm.utils.process.fork_server import ForkServer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = init_logger(__name__)

NUM_WORKERS = 2
"""Number of processes that compile; the engine and the server need the rest of the machine."""

_ENTRY_BYTES = 1024
"""Approximate bytes of an entry of the cache in addition to its content."""


class _Refusal(msgspec.Struct, frozen=True):
    """A grammar that can never be compiled, with the reason."""

    reason: str


_Result = Grammar | _Refusal


class GrammarCompiler:
    """Compiles grammars for one tokenizer, in processes that are killed when a grammar takes too
    long.

    They are forked by a process that has already loaded the libraries and the vocabulary, so that
    after a process was killed the next request does not wait for imports.

    Thread-safe. A call may block for twice the time limit: once for its turn, once for compiling.

    Args:
        config: limits and defaults.
        tokenizer: tokenizer of the outputs; None: all requests are refused.
        vocab_size: number of logits of the model.

    Attributes:
        tokenizer: tokenizer of the outputs, as given.
    """

    def __init__(
        self,
        config: StructuredOutputConfig,
        tokenizer: "PreTrainedTokenizerBase | None",
        vocab_size: int,
    ) -> None:
        self._config = config
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._results: OrderedDict[bytes, _Result] = OrderedDict()
        self._results_bytes = 0
        self._under_way: dict[bytes, Future[_Result]] = {}
        self._start_lock = threading.Lock()
        self._server: ForkServer | None = None
        self._workers: list[DeadlineWorker] = []
        self._is_closed = False
        self._idle: queue.LifoQueue[DeadlineWorker] = queue.LifoQueue()

    # ---- compiling ------------------------------------------------------------------------

    def compile(self, params: GuidedDecodingParams) -> Grammar:
        """Return the grammar of a request, from the cache if possible.

        Raises:
            RequestError: the grammar is not valid, no library can enforce all of it, or compiling
                is too costly; names the field.
            CapacityError: (503) other grammars are being compiled, and the wait was too long.
        """
        spec, field = make_spec(params, self._config), field_of(params)
        result = self._known(spec.key)
        if result is None:
            try:
                result = self._compile_once(spec)
            except RequestError as error:  # structured output is not possible with this tokenizer
                raise RequestError(f"{field}: {error}", param=field) from error
        return _grammar_of(result, field)

    def cached(self, params: GuidedDecodingParams) -> Grammar | None:
        """Return the grammar if it is in the cache, else None. Does not block.

        Raises:
            RequestError: the grammar is not valid or cannot be enforced.
        """
        spec, field = make_spec(params, self._config), field_of(params)
        result = self._known(spec.key)
        return None if result is None else _grammar_of(result, field)

    def start(self, after: "Future[None] | None" = None) -> None:
        """Start the processes in the background, so that the first request does not wait for
        them.

        Args:
            after: work that more requests need, and that has the processor cores first.
        """
        start_in_time_slices(lambda: self._start_first(after), "grammar-start")

    def close(self) -> None:
        """End the processes, even while they start. Running compilations fail."""
        self._is_closed = True
        if self._server is None:
            return
        self._server.close()  # also stops its imports, for which a starting worker waits
        for worker in self._workers:
            worker.close()
        self._server.close()  # again, because a worker may have restarted it

    def _compile_once(self, spec: GrammarSpec) -> _Result:
        """Compile, or wait for another request that is compiling the same grammar."""
        with self._lock:
            future = self._under_way.get(spec.key)
            is_ours = future is None
            if future is None:
                future = self._under_way[spec.key] = Future()
        if not is_ours:
            return future.result()
        try:
            result = self._compile(spec)
        except BaseException as error:
            self._forget_future(spec.key)
            future.set_exception(error)
            raise
        self._remember(spec.key, result)
        self._forget_future(spec.key)
        future.set_result(result)
        return result

    def _forget_future(self, key: bytes) -> None:
        with self._lock:
            del self._under_way[key]

    def _compile(self, spec: GrammarSpec) -> _Result:
        timeout_s = self._config.grammar_compile_timeout
        self._make_workers()
        try:
            worker = self._idle.get(timeout=timeout_s)
        except queue.Empty:
            raise CapacityError(
                f"{NUM_WORKERS} grammars have been compiling for {timeout_s:g} s: try again later",
                status=503,
            ) from None
        try:
            _start(worker)
            answer = worker.call(msgspec.msgpack.encode(spec), timeout_s)
        except DeadlineExceeded:
            return _Refusal(f"it takes more than {timeout_s:g} s to compile")
        except CallFailed as error:
            logger.error("compiling a grammar failed: %s", error)
            return _Refusal("it cannot be compiled")
        except WorkerError:
            return _Refusal("it needs too much memory to compile")
        finally:
            self._idle.put(worker)
        result = msgspec.msgpack.decode(answer, type=Grammar | str)
        if isinstance(result, str):
            return _Refusal(result)
        if result.left_out:
            left_out = ", ".join(result.left_out)
            logger.info("a schema that is not strict has parts that are not enforced: %s", left_out)
        return result

    # ---- processes ------------------------------------------------------------------------

    def _make_workers(self) -> None:
        with self._start_lock:
            if not self._workers:
                vocabulary = Vocabulary.of(self.tokenizer, self._vocab_size)
                self._server = make_server(
                    "vllm.structured_output.compile_worker:serve", vocabulary.encoded
                )
                self._workers = [DeadlineWorker(self._server) for _ in range(NUM_WORKERS)]
                for worker in self._workers:
                    self._idle.put(worker)

    def _start_first(self, after: "Future[None] | None") -> None:
        if after is not None:
            wait([after])
        if self._is_closed:
            return
        try:
            self._make_workers()
            for worker in self._workers:
                if self._is_closed:
                    return
                worker.start()
        except (RequestError, WorkerError) as error:
            if not self._is_closed:
                logger.info("requests for structured output will be refused: %s", error)

    # ---- the cache ------------------------------------------------------------------------

    def _known(self, key: bytes) -> _Result | None:
        with self._lock:
            result = self._results.get(key)
            if result is not None:
                self._results.move_to_end(key)
            return result

    def _remember(self, key: bytes, result: _Result) -> None:
        limit = self._config.grammar_cache_bytes
        with self._lock:
            if _cost(result) > limit:
                return
            self._results[key] = result
            self._results_bytes += _cost(result)
            while self._results_bytes > limit:
                _, oldest = self._results.popitem(last=False)
                self._results_bytes -= _cost(oldest)


def _start(worker: DeadlineWorker) -> None:
    try:
        worker.start()
    except WorkerError as error:
        raise RequestError(f"structured output is not available: {error}") from error


def _grammar_of(result: _Result, field: str) -> Grammar:
    if isinstance(result, Grammar):
        return result
    raise RequestError(f"{field}: {result.reason}", param=field)


def _cost(result: _Result) -> int:
    content = result.content if isinstance(result, Grammar) else result.reason.encode()
    return len(content) + _ENTRY_BYTES
