"""An engine core without a model, and the real `AsyncLLM` over it.

    AsyncLLM  ->  FakeCoreClient  ->  CoreLoop  ->  FakeEngineCore

Messages are encoded and decoded. Everything runs in one event loop, without a process.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from tests.engine.fakes import logprob_rows, make_config
from tests.engine.tokenizers_for_tests import byte_level
from vllm.config import VllmConfig
from vllm.engine.async_llm_engine import AsyncLLM
from vllm.engine.process import core_supervisor
from vllm.engine.process.core_process import CoreLoop
from vllm.engine.process.wire import (
    AddRequests,
    CoreFailed,
    CoreProgress,
    CoreReady,
    FromCore,
    ToCore,
    decode_from_core,
    encode,
)
from vllm.errors import CapacityError, EngineAsleepError, EngineDeadError
from vllm.executor.ranks.worker_call import call_worker
from vllm.messages import (
    EngineOutput,
    EngineRequest,
    Finished,
    FinishReason,
    Grammar,
    LogprobRows,
    SchedulerStats,
)
from vllm.structured_output.compiler import GrammarCompiler
from vllm.transformers_utils import generation_config, tokenizer

TAGS = ("weights", "kv_cache")
Reply = Callable[[EngineRequest], list[int]]


class FakeEngineCore:
    """Replies with a script, one token per request and step. Finishes requests like the real core.

    Args:
        reply: the tokens of a request, cycled when they run out.
        capacity: largest number of prompt and output tokens of a request.

    Attributes:
        added: every request taken, by id.
        aborted: ids of requests that were aborted while they existed.
        fail: error that the next step raises, once.
        fail_at: after this many steps every step fails.
        errors: request id -> message; the request fails instead of giving its next token.
        error_after: number of tokens and message; every request fails with the message after this
            many tokens.
        hold_after: every request waits after this many tokens; None: no request waits.
        worker: object whose methods can be called.
    """

    def __init__(self, reply: Reply = lambda request: [10], capacity: int = 10**6) -> None:
        self.reply = reply
        self.capacity = capacity
        self.added: dict[str, EngineRequest] = {}
        self.running: dict[str, EngineRequest] = {}
        self.aborted: list[str] = []
        self.fail: BaseException | None = None
        self.fail_at: int | None = None
        self.errors: dict[str, str] = {}
        self.error_after: tuple[int, str] | None = None
        self.hold_after: int | None = None
        self.calls: Counter[str] = Counter()
        self.worker: Any = object()
        self.sleeping_tags: list[str] = []
        self._num_output: Counter[str] = Counter()

    def add_request(self, request: EngineRequest) -> None:
        if self.sleeping_tags:
            raise EngineAsleepError(self.sleeping_tags)
        if request.max_total_tokens > self.capacity:
            raise CapacityError(f"needs {request.max_total_tokens} tokens of {self.capacity}")
        self.added[request.request_id] = self.running[request.request_id] = request

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if self.running.pop(request_id, None) is not None:
                self.aborted.append(request_id)

    def check_health(self) -> None:
        """Do nothing: the workers never fail by themselves."""

    def has_idle_work(self) -> bool:
        return False

    def has_unfinished_requests(self) -> bool:
        return any(not self._is_held(request_id) for request_id in self.running)

    def _is_held(self, request_id: str) -> bool:
        return self.hold_after is not None and self._num_output[request_id] >= self.hold_after

    def reset_prefix_cache(self) -> bool:
        return not self.running

    def reset_mm_cache(self) -> bool:
        return True

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None) -> list[Any]:
        return [call_worker(self.worker, method, args, kwargs or {})]

    def call_workers(self, method, args=(), kwargs=None) -> list[Any]:
        return self.collective_rpc(method, None, args, kwargs)

    def sleep(self, level: int = 1) -> None:
        if self.running:
            raise CapacityError(f"{len(self.running)} requests run", status=409)
        self.sleeping_tags = ["weights", "kv_cache"]

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.sleeping_tags = [tag for tag in self.sleeping_tags if tag not in (tags or TAGS)]

    def is_sleeping(self) -> bool:
        return bool(self.sleeping_tags)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(num_running=len(self.running), num_kv_blocks=100)

    def shutdown(self) -> None:
        self.calls["shutdown"] += 1

    def step(self) -> EngineOutput:
        if self.calls["step"] == self.fail_at:
            raise EngineDeadError("a step failed")
        self.calls["step"] += 1
        if self.fail is not None:
            failure, self.fail = self.fail, None
            raise failure
        ids: list[str] = []
        tokens: list[int] = []
        messages = dict(self.errors)
        if self.error_after is not None:
            count, message = self.error_after
            messages |= {i: message for i in self.running if self._num_output[i] == count}
        failed = [i for i in self.running if i in messages]
        finished = {i: Finished(FinishReason.ERROR, error=messages[i]) for i in failed}
        logprobs: dict[str, LogprobRows] = {}
        prompt_logprobs: dict[str, LogprobRows] = {}
        cached: dict[str, int] = {}
        for request_id, request in self.running.items():
            if request_id in finished or self._is_held(request_id):
                continue
            count = self._num_output[request_id]
            script = self.reply(request)
            token_id = script[count % len(script)]
            params = request.sampling_params
            if count == 0:
                cached[request_id] = 4
                if params.prompt_logprobs is not None:
                    prompt_logprobs[request_id] = logprob_rows(
                        request.prompt_token_ids[1:], params.prompt_logprobs
                    )
            if params.logprobs is not None:
                logprobs[request_id] = logprob_rows([token_id], params.logprobs)
            ids.append(request_id)
            tokens.append(token_id)
            self._num_output[request_id] = count + 1
            if (end := self._end(request, token_id, count + 1)) is not None:
                finished[request_id] = end
        for request_id in finished:
            del self.running[request_id]
        return EngineOutput(
            request_ids=ids,
            token_ids=tokens,
            finished=finished,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=cached,
        )

    def _end(self, request: EngineRequest, token_id: int, num_output: int) -> Finished | None:
        if token_id == request.eos_token_id:
            return Finished(FinishReason.STOP)
        if token_id in request.stop_token_ids:
            return Finished(FinishReason.STOP, token_id)
        if len(request.prompt_token_ids) + num_output >= request.max_total_tokens:
            return Finished(FinishReason.LENGTH)
        return None


class FakeCoreClient:
    """Stands in for `CoreClient`.

    Attributes:
        core: a `FakeEngineCore`, or a real core.
        received: requests that were sent to it.
        is_held: the core computes nothing until it is released.
        failure: error that is reported instead of readiness.
    """

    pid = 1

    def __init__(self, core: Any, failure: CoreFailed | None = None) -> None:
        self.core = core
        self.failure = failure
        self.is_held = False
        self.is_closed = False
        self.received: list[EngineRequest] = []
        self._inbox: deque[bytes] = deque()
        self._loop = CoreLoop(core, self._receive, self.tell)

    def configure(self, config, models) -> None:
        """Do nothing: the core needs only its script."""

    def attach(
        self, on_message: Callable[[FromCore], None], on_death: Callable[[str], None]
    ) -> None:
        self._on_message, self._on_death = on_message, on_death
        loop = asyncio.get_running_loop()
        loop.call_soon(self.tell, CoreProgress(phase="loading", done=1, total=2))
        if self.failure is not None:
            loop.call_soon(self.tell, self.failure)
            loop.call_soon(self.die, "exit code 2")
        else:
            loop.call_soon(self.tell, CoreReady(stats=self.core.stats()))

    def send(self, message: ToCore) -> None:
        self._inbox.append(encode(message))
        if isinstance(message, AddRequests):
            self.received += message.requests
        asyncio.get_running_loop().call_soon(self.turn)

    def turn(self) -> None:
        if self.is_closed or self.is_held:
            return
        try:
            self._loop.turn()
        except EngineDeadError as error:
            self.tell(CoreFailed(message=str(error), is_config_error=False))
            self.die("exit code 1")
            return
        if self.core.has_unfinished_requests():
            asyncio.get_running_loop().call_soon(self.turn)

    @property
    def has_messages(self) -> bool:
        """Return whether messages are left to read."""
        return bool(self._inbox)

    def die(self, cause: str = "signal 9") -> None:
        if not self.is_closed:
            self._on_death(cause)

    def kill(self) -> None:
        self.is_closed = True

    def close(self) -> None:
        self.kill()

    def _receive(self, wait: bool) -> bytes | None:
        return self._inbox.popleft() if self._inbox else None

    def tell(self, message: FromCore) -> None:
        """Deliver a message of the core."""
        if not self.is_closed:
            self._on_message(decode_from_core(encode(message)))


@contextmanager
def fake_clients(*clients: FakeCoreClient) -> Iterator[None]:
    """Give these clients to engines that start inside the block: one after another, for replicas in
    order.

    They are returned from a thread, like real clients.
    """
    left = deque(clients)

    def start_core() -> "asyncio.Future[FakeCoreClient]":
        # Take the client here, since the threads of several replicas run in any order.
        client = left.popleft()
        return asyncio.get_running_loop().run_in_executor(None, lambda: client)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_supervisor, "start_core_here", start_core)
        yield


class CoreInProcess(AsyncLLM):
    """The real engine with a core in this process; it runs inside `running`.

    Args:
        config: of the engine.
        core: a `FakeEngineCore`, or the core of another engine.
        given_tokenizer: tokenizer; None: there is none.
        model_defaults: sampling defaults, as from generation_config.json.

    Attributes:
        client: client of the core.
    """

    def __init__(
        self,
        config: VllmConfig,
        core: Any,
        given_tokenizer: Any,
        model_defaults: Mapping[str, Any],
    ) -> None:
        super().__init__(config=config)
        self.core = core
        self.client = FakeCoreClient(core)
        self.given_tokenizer = given_tokenizer
        self.model_defaults = model_defaults

    @property
    def seen(self) -> list[tuple[dict[str, Any], Any, str]]:
        """Prompt, parameters and id of each request that was sent to the core. (In the core, the id
        has a number that the engine adds.)
        """
        return [
            (
                {"prompt_embeds": request.embeddings}
                if request.embeddings
                else {"prompt_token_ids": request.prompt_token_ids},
                request.sampling_params,
                request.request_id.rpartition("-")[0],
            )
            for request in self.client.received
        ]


class FakeCoreLLM(CoreInProcess):
    """The real engine with the bundled model's tokenizer, over a fake core.

    Args:
        reply: the tokens of a request, cycled when they run out.
        max_model_len: largest number of prompt and output tokens of a request.
        generation_defaults: sampling defaults, as from generation_config.json.
        given_tokenizer: another tokenizer.
        model: further arguments of `make_config`.
    """

    def __init__(
        self,
        reply: Reply = lambda request: [10],
        max_model_len: int = 256,
        generation_defaults: Mapping[str, Any] | None = None,
        given_tokenizer: Any = None,
        **model: Any,
    ) -> None:
        super().__init__(
            make_config(max_model_len, **model),
            FakeEngineCore(reply),
            given_tokenizer or byte_level(),
            {"eos_token_ids": [], **(generation_defaults or {})},
        )


@contextmanager
def faked(engine: CoreInProcess) -> Iterator[None]:
    """Let an engine start without a process or files. With a fake core, grammars are not
    compiled.
    """
    grammar = Grammar(backend="xgrammar", content=b"", key=b"", vocabulary_key=b"")
    with fake_clients(engine.client), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "load_tokenizer", lambda model: engine.given_tokenizer)
        patch.setattr(
            generation_config, "load_generation_defaults", lambda model: engine.model_defaults
        )
        patch.setattr(GrammarCompiler, "start", lambda self, after=None: None)
        if isinstance(engine.core, FakeEngineCore):
            patch.setattr(GrammarCompiler, "cached", lambda self, params: grammar)
        yield


@asynccontextmanager
async def running(engine: CoreInProcess) -> AsyncIterator[None]:
    """Let an engine run in this event loop."""
    with faked(engine):
        await engine.start()
        try:
            yield
        finally:
            engine.shutdown()
