"""The asynchronous engine: an engine core in its own process, many requests at once.

    generate()  ->  InputProcessor  ->  AddRequests  ->  | core process |
    consumer    <-  RequestStream   <-  OutputProcessor  <-  CoreOutput

Everything here runs in one event loop; only long tokenisation, grammars and the reading of the
model's files go to threads.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from vllm.config import ParallelConfig, VllmConfig
from vllm.engine.async_control import AsyncControl
from vllm.engine.fan_out import fan_out
from vllm.engine.input.input_processor import InputProcessor, TokenizedPrompt
from vllm.engine.input.preparation import Preparation
from vllm.engine.metrics.engine_metrics import EngineMetrics
from vllm.engine.metrics.replica_metrics import ReplicaMetrics
from vllm.engine.metrics.stats_log import StatsLog
from vllm.engine.metrics.stats_recorder import StatsRecorder
from vllm.engine.output.output_processor import OutputProcessor
from vllm.engine.output.request_stream import RequestStream
from vllm.engine.process.admission import Admission, AdmissionLimits
from vllm.engine.process.core_replicas import CoreReplicas
from vllm.engine.process.startup_state import StartupState
from vllm.engine.process.wire import CoreOutput, Refused
from vllm.engine.unavailable import refuse
from vllm.errors import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    RequestError,
    RequestTimeoutError,
)
from vllm.inputs import PromptType
from vllm.logger import init_logger
from vllm.messages import EngineRequest, FinishReason
from vllm.outputs import AnyRequestOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

logger = init_logger(__name__)

_Result = TypeVar("_Result")


_GRAMMAR_THREADS = 8
"""Threads for requests whose grammar is being compiled or waits for a compiler."""


class AsyncLLM(AsyncControl):
    """The asynchronous engine: requests of many users, computed by one engine core.

    Nothing is loaded before `start`, or the first request.

    Args:
        engine_args: what to run.
        limits: limits for waiting requests and their time.
        num_restarts: how often a core that died is restarted, for each replica.
        config: complete, in place of `engine_args`.
        began: when the caller began to wait for the engine, in seconds of `time.monotonic()`; for
            the log. None is when it starts.

    Attributes:
        metrics: the metrics; None before the model's config has been read.
        input_processor, output_processor, generation_defaults: available once it has started.
    """

    def __init__(
        self,
        engine_args: "EngineArgs | None" = None,
        *,
        limits: AdmissionLimits | None = None,
        num_restarts: int = 0,
        config: VllmConfig | None = None,
        began: float | None = None,
    ) -> None:
        assert (engine_args is None) != (config is None), "give either engine_args or config"
        self.metrics: ReplicaMetrics | None = None
        self._engine_args = engine_args
        self._config = config
        self._began = began
        self._limits = limits or AdmissionLimits()
        self._core = CoreReplicas(
            _replicas(engine_args, config),
            num_restarts,
            on_output=self._on_output,
            on_refused=self._on_refused,
            on_lost=self._on_lost,
        )
        self._start_task: asyncio.Task[None] | None = None
        self._core_ids = itertools.count()
        self._streams: dict[str, RequestStream[Any]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._preparation = Preparation(lambda: self.input_processor)
        self._grammar_lane = ThreadPoolExecutor(_GRAMMAR_THREADS, thread_name_prefix="grammar")
        self._stats_task: asyncio.Task[None] | None = None
        self._is_shut_down = False

    @classmethod
    def from_engine_args(
        cls,
        engine_args: "EngineArgs",
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Any = None,
    ) -> "AsyncLLM":
        """Make an engine for these arguments. It loads with the first request at the latest.

        Raises:
            ConfigError: the engine cannot start with them.
        """
        engine = cls(config=engine_args.create_engine_config())
        if start_engine_loop:
            with contextlib.suppress(RuntimeError):  # no event loop runs yet
                engine._begin_start()
        return engine

    # ---- start and end --------------------------------------------------------------------

    @property
    def startup(self) -> StartupState:
        """State of the start of the engine."""
        return self._core.startup

    def prepare(self) -> None:
        """Start the process of the core in the background, before `start`."""
        self._core.prepare()

    async def start(self) -> None:
        """Load model and tokenizer, and wait until requests are computed.

        Raises:
            ConfigError: the engine cannot start with its arguments.
            EngineDeadError: its process has ended.
        """
        await asyncio.shield(self._begin_start())

    async def wait_ready(self) -> None:
        """Wait until the engine is ready; start it if nobody has. Raises as `start`."""
        if not self.startup.is_ready:
            self._begin_start()
            await self.startup.wait()

    def shutdown(self) -> None:
        """End the core process now; running requests end with EngineDeadError."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        error = EngineDeadError("the engine was shut down")
        self._core.stop(error)
        for request_id in list(self._streams):
            self._lose(request_id, error)
        if self._stats_task is not None:
            self._stats_task.cancel()
        self._preparation.shutdown()
        self._grammar_lane.shutdown(wait=False, cancel_futures=True)
        if self.is_loaded:
            self.input_processor.close()

    def start_background_loop(self) -> None:
        """Begin to load, in the event loop that runs; a name of the V0 engine."""
        self._begin_start()

    shutdown_background_loop = shutdown

    def on_death(self, callback: Callable[[BaseException], None]) -> None:
        """Register a callback for when the core has died and will not be restarted."""
        self._core.death_callbacks.append(callback)

    def _begin_start(self) -> "asyncio.Task[None]":
        if self._start_task is None:
            self._start_task = asyncio.get_running_loop().create_task(self._start())
            # If nobody awaits the start, its error goes to those who wait for readiness.
            self._start_task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._start_task

    async def _start(self) -> None:
        began = time.monotonic() if self._began is None else self._began
        await self._core.start(self._resolve, self._load_frontend)
        assert self.metrics is not None
        logger.info("ready in %.1f s: %s", time.monotonic() - began, self.vllm_config.summary)
        self._stats_log = StatsLog(self.metrics)
        if not self.vllm_config.observability.disable_log_stats:
            self._stats_task = asyncio.create_task(self._stats_log.run())

    def _resolve(self) -> VllmConfig:
        if self._config is None:
            assert self._engine_args is not None
            self._config = self._engine_args.create_engine_config()
        return self._config

    def _load_frontend(self, config: VllmConfig) -> None:
        """Load the tokenizer and make the processors."""
        from vllm.transformers_utils.generation_config import load_generation_defaults
        from vllm.transformers_utils.tokenizer import load_tokenizer

        began = time.monotonic()
        tokenizer = load_tokenizer(config.model)
        if tokenizer is not None:
            logger.info("start: loading the tokenizer took %.1f s", time.monotonic() - began)
        self.generation_defaults = dict(load_generation_defaults(config.model))
        self.input_processor = InputProcessor(config, tokenizer, self.generation_defaults)
        name = config.model.served_model_name[0]
        replicas = [EngineMetrics(name, config, replica=n) for n in range(len(self._core))]
        self.metrics = ReplicaMetrics(replicas)
        self._recorder = StatsRecorder(*replicas)
        self.output_processor = OutputProcessor(tokenizer, self._recorder)
        if tokenizer is not None and config.model.pooler is None:
            # While the core loads its weights: no request, the first one least of all, waits for
            # the imports of the grammar libraries.
            self.input_processor.grammar_compiler.start()
        self._preparation.prepare()
        self._admission = Admission(self._limits, config.scheduler.max_num_seqs * len(self._core))

    # ---- requests -------------------------------------------------------------------------

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        prompt_adapter_request: Any = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt.

        Leaving the loop over the outputs, or cancelling it, aborts the request.

        Args:
            prompt: of any prompt type.
            sampling_params: `output_kind` says what each output holds.
            request_id: comes back in the outputs; free again when the request has ended.
            lora_request: the adapter to use; None: the model alone.
            prompt_adapter_request: only None for now.
            trace_headers: ignored; the server makes the spans.
            priority: a smaller one goes first, where the scheduling policy is "priority".
            data_parallel_rank: the replica that computes it; None: the one with the least to do.

        Yields:
            Outputs as they come; the last one is finished.

        Raises:
            RequestError: the request is wrong.
            CapacityError: it can never fit, or too many requests wait (status 503).
            RequestTimeoutError: it took longer than the limits allow.
            EngineDeadError: the core has died.
        """
        refuse(prompt_adapter_request=prompt_adapter_request)
        arrival_time = time.time()
        await self.wait_ready()
        if lora_request is not None:  # not on the event loop
            await self._find_adapter(lora_request)
        text, request = await self._preparation.process(
            prompt,
            sampling_params,
            lambda prompt, processor: processor.process(
                request_id,
                prompt,
                sampling_params,
                arrival_time=arrival_time,
                priority=priority,
                lora_request=lora_request,
            ),
        )
        stream = self._submit(text, await self._with_grammar(request), data_parallel_rank)
        try:
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            if not stream.is_finished:
                self._abort([request_id])

    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Pool one prompt, with a pooling model.

        Yields:
            The result, once.

        Raises:
            As `generate`.
        """
        refuse(lora_request=lora_request)
        arrival_time = time.time()
        await self.wait_ready()
        text, request = await self._preparation.process(
            prompt,
            pooling_params,
            lambda prompt, processor: processor.process_pooling(
                request_id, prompt, pooling_params, arrival_time=arrival_time, priority=priority
            ),
        )
        stream = self._submit(text, request)
        try:
            yield await stream.get()
        finally:
            if not stream.is_finished:
                self._abort([request_id])

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests with finish reason "abort"; unknown ids are ignored."""
        if self.startup.is_ready:
            self._abort([request_id] if isinstance(request_id, str) else request_id)

    async def tokenize(
        self, prompt: PromptType, *, is_long: bool = False, max_tokens: int | None = None
    ) -> TokenizedPrompt:
        """Token ids of a prompt; see `Preparation.tokenize`."""
        return await self._preparation.tokenize(prompt, is_long=is_long, max_tokens=max_tokens)

    async def in_slow_lane(
        self, work: Callable[[InputProcessor], _Result], num_chars: int = 0
    ) -> _Result:
        """Run slow work with a tokenizer in a thread; see `Preparation.in_slow_lane`."""
        return await self._preparation.in_slow_lane(work, num_chars)

    async def _with_grammar(self, request: EngineRequest) -> EngineRequest:
        """The request with its compiled grammar, if it asks for structured output."""
        if request.sampling_params.guided_decoding is None:
            return request
        processor = self.input_processor
        cached = processor.attach_cached_grammar(request)
        if cached is not None:
            return cached
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._grammar_lane, processor.attach_grammar, request)

    def _submit(
        self, text: str | None, request: EngineRequest, replica: int | None = None
    ) -> RequestStream[Any]:
        """Send a request to a core. Returns its stream."""
        # The user's id may be used again while outputs of its last request are still arriving.
        own = replace(request, request_id=f"{request.request_id}-{next(self._core_ids)}")
        core_requests = fan_out(own)
        num_tokens = len(request.prompt_token_ids)
        self._admission.check(len(core_requests), num_tokens * len(core_requests))
        core_ids = [core_request.request_id for core_request in core_requests]
        replica = self._core.choose(own, core_ids, replica)
        try:
            self.output_processor.add_request(
                request.request_id, text, request.sampling_params, core_requests, replica
            )
        except BaseException:
            self._core.end(core_ids)
            raise
        try:
            self._core.add(replica, own)
        except BaseException:
            self._core.end(core_ids)
            self.output_processor.abort([request.request_id])
            raise
        for core_request in core_requests:
            self._admission.add(core_request.request_id, num_tokens)
        stream: RequestStream[Any] = RequestStream()
        self._streams[request.request_id] = stream
        if (timeout := self._limits.request_timeout) is not None:
            loop = asyncio.get_running_loop()
            self._timers[request.request_id] = loop.call_later(
                timeout, self._time_out, request.request_id, timeout
            )
        return stream

    def _time_out(self, request_id: str, timeout: float) -> None:
        error = RequestTimeoutError(
            f"the request took longer than the {timeout:g} s that this server allows "
            f"(request_timeout)"
        )
        self._end_with(request_id, error)

    def _end_with(self, request_id: str, error: Exception) -> None:
        if (stream := self._streams.get(request_id)) is not None:
            stream.fail(error)
        self._abort([request_id])

    def _abort(self, request_ids: Iterable[str]) -> None:
        outputs, core_ids = self.output_processor.abort(request_ids)
        self._send_aborts(core_ids)
        for output in outputs:
            self._deliver(output)

    def _send_aborts(self, core_ids: list[str]) -> None:
        self._admission.end(core_ids)
        self._core.abort(core_ids)

    # ---- messages of the core ---------------------------------------------------------------

    def _on_output(self, replica: int, message: CoreOutput) -> None:
        output = message.output
        if output.scheduled_times:
            self._admission.begin(output.scheduled_times)
        if output.finished:
            self._admission.end(output.finished)
        outputs, stopped = self.output_processor.process(output)
        self._recorder.end_message(message.stats, replica)
        if stopped:
            self._send_aborts(stopped)
        for request_output in outputs:
            self._deliver(request_output)

    def _deliver(self, output: AnyRequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        if output.finished:
            self._forget(output.request_id)
        if stream is not None and not stream.is_finished:
            stream.put(output, is_last=output.finished)

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        if (timer := self._timers.pop(request_id, None)) is not None:
            timer.cancel()

    def _on_refused(self, message: Refused) -> None:
        self._core.end([message.request_id])
        request_id = self.output_processor.request_id_of(message.request_id)
        if request_id is None:
            return  # another sample of it was refused before
        error: Exception = RequestError(message.message, param=message.param)
        if message.is_capacity:
            error = CapacityError(message.message, status=message.status)
        self._end_with(request_id, error)

    def _on_lost(
        self, replica: int, error: BaseException, will_return: bool, core_ids: list[str]
    ) -> None:
        """The core of a replica has died: end its requests with its error."""
        if self.metrics is not None:
            self.metrics.replicas[replica].record_loss(is_restarted=will_return)
        for core_id in core_ids:
            request_id = self.output_processor.request_id_of(core_id)
            if request_id is not None:
                self._lose(request_id, error)

    def _lose(self, request_id: str, error: BaseException) -> None:
        """End a request whose core is gone with an error."""
        if (stream := self._streams.get(request_id)) is not None:
            stream.fail(error)
        self._forget(request_id)
        _, core_ids = self.output_processor.abort([request_id], FinishReason.ERROR)
        self._admission.end(core_ids)

    # ---- the engine itself ----------------------------------------------------------------

    @property
    def is_loaded(self) -> bool:
        """Whether tokenizer and processors are loaded."""
        return hasattr(self, "_admission")

    @property
    def vllm_config(self) -> VllmConfig:
        """The config of the engine. Available once the start has read the model's config."""
        assert self._config is not None, "the engine has not started"
        return self._config

    @property
    def num_unfinished_requests(self) -> int:
        """Number of requests whose outputs are not complete."""
        return len(self._streams)


def _replicas(engine_args: "EngineArgs | None", config: VllmConfig | None) -> ParallelConfig:
    """How many cores to start, and where. A wrong number is reported when the config is made."""
    if config is not None:
        return config.parallel
    assert engine_args is not None
    with contextlib.suppress(ConfigError):
        return ParallelConfig(
            data_parallel_size=engine_args.data_parallel_size,
            data_parallel_size_local=engine_args.data_parallel_size_local,
            data_parallel_address=engine_args.data_parallel_address,
            data_parallel_rpc_port=engine_args.data_parallel_rpc_port,
        )
    return ParallelConfig()


AsyncLLMEngine = AsyncLLM
