"""Run the asynchronous engine: an engine core in its own process, many requests at once.

    generate()  ->  InputProcessor  ->  AddRequests  ->  | core process |
    consumer    <-  RequestStream   <-  OutputProcessor  <-  CoreOutput

Everything runs in one event loop, except long tokenisation, grammars and the reading of model
files, which run in threads.
"""

import asyncio
import contextlib
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from vllm.config import LoRAConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.config.structured_output import StructuredOutputConfig
from vllm.engine.adapter_calls import POLL_S, call_of, check_on, check_pinned, is_loaded
from vllm.engine.input.input_processor import InputProcessor
from vllm.engine.input.media_input import MediaInput
from vllm.engine.input.preparation import Preparation
from vllm.engine.input.prompt_tokenizer import TokenizedPrompt
from vllm.engine.metrics.bucket_adaptation import BucketAdaptation
from vllm.engine.metrics.engine_metrics import EngineMetrics
from vllm.engine.metrics.replica_metrics import ReplicaMetrics, sum_stats
from vllm.engine.metrics.stats_log import StatsLog
from vllm.engine.metrics.traffic_metrics import BucketAdvice, TrafficFile
from vllm.engine.output.output_processor import OutputProcessor
from vllm.engine.output.stats_recorder import StatsRecorder
from vllm.engine.process.admission import Admission, AdmissionLimits
from vllm.engine.process.core_calls import CoreCalls
from vllm.engine.process.startup_state import StartupState
from vllm.engine.process.wire import CoreOutput, Refused
from vllm.engine.replicas.core_replicas import CoreReplicas, ReplicaState
from vllm.engine.requests_in_flight import RequestsInFlight
from vllm.engine.unavailable import refuse
from vllm.errors import (
    ConfigError,
    EngineStoppedError,
    RequestError,
    RequestTimeoutError,
    VllmError,
)
from vllm.executor import Worker
from vllm.inputs import PromptType
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.messages import AdapterRef, EngineRequest, SchedulerStats
from vllm.multimodal.audio.sound import Samples
from vllm.multimodal.interface.source import MediaSource
from vllm.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vllm.engine.arg_utils import EngineArgs

logger = init_logger(__name__)

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

_STOPPED = (
    "the server was stopped before this request had finished. Send it again when the server runs "
    "again, or to another server"
)
_GRAMMAR_THREADS = 8
"""Threads for requests whose grammar is being compiled or waits for a compiler."""


def _of_cores(
    method: Callable[Concatenate[CoreCalls, _Args], _Result],
    combine: Callable[[list[_Result]], _Result],
) -> "Callable[Concatenate[AsyncLLM, _Args], Coroutine[Any, Any, _Result]]":
    """Return a method that calls the cores of all replicas. It has the signature and docstring of
    `method`.

    Args:
        method: method of `CoreCalls`.
        combine: combines the results of the cores to one result.
    """

    @wraps(method)
    async def call(self: "AsyncLLM", /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        await self.wait_ready()
        return combine(await self._core.calls.call(method, *args, **kwargs))

    return call


def _first(results: list[_Result]) -> _Result:
    return results[0]


class AsyncLLM:
    """The asynchronous engine: computes the requests of many users at the same time.

    Nothing is loaded before `start`, or the first request.

    Args:
        engine_args: arguments of the engine.
        limits: limits for waiting requests and their time.
        num_restarts: how often a core that died is restarted, for each replica.
        config: complete config, instead of `engine_args`.
        began: when the caller began to wait for the engine, in seconds of `time.monotonic()`; for
            the log. None: the time of the start.

    Attributes:
        metrics: the metrics; None before the model's config has been read.
        input_processor, output_processor, generation_defaults: available after the start.
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
        self._preparation = Preparation(lambda: self.input_processor)
        self._grammar_threads = ThreadPoolExecutor(_GRAMMAR_THREADS, thread_name_prefix="grammar")
        self._tasks: list[asyncio.Task[None]] = []
        self._traffic_file: TrafficFile | None = None
        self._is_shut_down = False

    @classmethod
    def from_engine_args(
        cls,
        engine_args: "EngineArgs",
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Any = None,
    ) -> "AsyncLLM":
        """Create an engine for these arguments. It is loaded with the first request at the latest.

        Raises:
            ConfigError: the engine cannot start with the arguments.
        """
        engine = cls(config=engine_args.create_engine_config())
        if start_engine_loop:
            with contextlib.suppress(RuntimeError):  # no event loop runs yet
                engine._begin_start()
        return engine

    # ---- start and end --------------------------------------------------------------------

    @property
    def startup(self) -> StartupState:
        """State of the engine's start."""
        return self._core.startup

    def prepare(self) -> None:
        """Start the core process in the background, before `start` is called."""
        self._core.prepare()

    async def start(self) -> None:
        """Load the model and the tokenizer; returns when requests can be computed.

        Raises:
            ConfigError: the engine cannot start with its arguments.
            EngineDeadError: its process has ended.
        """
        await asyncio.shield(self._begin_start())

    async def wait_ready(self) -> None:
        """Wait until the engine is ready, and start it if that has not been done.

        Raises:
            ConfigError: the engine cannot start with its arguments.
            EngineDeadError: its process has ended.
        """
        if not self.startup.is_ready:
            self._begin_start()
            await self.startup.wait()

    def shutdown(self) -> None:
        """End the core process now; running requests fail with EngineStoppedError."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self._core.stop(EngineStoppedError("the engine was shut down"))
        if self.is_loaded:
            self._requests.lose_all(EngineStoppedError(_STOPPED))
        for task in self._tasks:
            task.cancel()
        if self._traffic_file is not None:
            self._traffic_file.write()
        self._preparation.shutdown()
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)
        if self.is_loaded:
            self.input_processor.close()

    def start_background_loop(self) -> None:
        """Begin to load the engine in the running event loop. The name comes from the V0 engine."""
        self._begin_start()

    shutdown_background_loop = shutdown

    def on_death(self, callback: Callable[[BaseException], None]) -> None:
        """Register a callback for the case that the core dies and will not be restarted."""
        self._core.death_callbacks.append(callback)

    def _begin_start(self) -> "asyncio.Task[None]":
        if self._start_task is None:
            self._start_task = asyncio.get_running_loop().create_task(self._start())
            # Read the exception, so that asyncio does not report it as never retrieved. Callers
            # that wait for readiness get the same error.
            self._start_task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._start_task

    async def _start(self) -> None:
        began = time.monotonic() if self._began is None else self._began
        await self._core.start(self._resolve, self._load_frontend)
        assert self.metrics is not None
        logger.info("ready in %.1f s: %s", time.monotonic() - began, self.vllm_config.summary)
        self._stats_log = StatsLog(self.metrics)
        if not self.vllm_config.observability.disable_log_stats:
            self._tasks.append(asyncio.create_task(self._stats_log.run()))
        if self.vllm_config.device.device == "hpu":
            self._tasks.append(asyncio.create_task(self._watch_buckets()))
        if self._traffic_file is not None:
            name = Worker.describe_engine.__name__
            of_replica, *_ = await self._core.calls.call(CoreCalls.call_workers, name)
            self._traffic_file.note_engine(of_replica[0])
            self._tasks.append(asyncio.create_task(self._traffic_file.run()))

    async def _watch_buckets(self) -> None:
        """Watch the traffic: replace buckets that pad too much, or log that better ones exist."""
        assert self.metrics is not None
        if not self.vllm_config.hpu.adapt_buckets:
            return await BucketAdvice(self.metrics, self.vllm_config).run()

        async def replace(buckets: Sequence[Sequence[int]]) -> bool:
            return any(await self._core.calls.call(CoreCalls.replace_buckets, buckets))

        await BucketAdaptation(self.metrics, self.vllm_config, replace).run()

    def _resolve(self) -> VllmConfig:
        if self._config is None:
            assert self._engine_args is not None
            self._config = self._engine_args.create_engine_config()
        return self._config

    def _load_frontend(self, config: VllmConfig) -> None:
        """Load the tokenizer and create the processors."""
        from vllm.transformers_utils.generation_config import load_generation_defaults
        from vllm.transformers_utils.tokenizer import load_tokenizer

        # First, because their imports take longest. They run while the core loads its weights, so
        # that no request waits for them.
        media_started = self._preparation.media.prepare(MediaInput(config))
        began = time.monotonic()
        tokenizer = load_tokenizer(config.model)
        if tokenizer is not None:
            logger.info("start: loading the tokenizer took %.1f s", time.monotonic() - began)
        self.generation_defaults = dict(load_generation_defaults(config.model))
        self.input_processor = InputProcessor(config, tokenizer, self.generation_defaults)
        name = config.model.served_model_name[0]
        replicas = [EngineMetrics(name, config, replica=n) for n in range(len(self._core))]
        self.metrics = ReplicaMetrics(replicas, self._preparation.media.stats)
        recorded = config.observability.record_traffic
        if recorded is not None:
            self._traffic_file = TrafficFile(Path(recorded), self.metrics)
        recorder = StatsRecorder(*replicas)
        self.output_processor = OutputProcessor(tokenizer, recorder)
        self._preparation.prepare()
        if tokenizer is not None and config.model.pooler is None:
            self.input_processor.grammar_compiler.start(after=media_started)
        self._requests = RequestsInFlight(
            self._core,
            self.output_processor,
            recorder,
            Admission(self._limits, config.scheduler.max_num_seqs * len(self._core)),
            self._limits.request_timeout,
        )

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

        If the caller leaves the loop over the outputs, or cancels it, the request is aborted.

        Args:
            prompt: prompt of any type.
            sampling_params: how to sample; `output_kind` selects the content of each output.
            request_id: id that is returned in the outputs; may be used again when the request has
                ended.
            lora_request: the adapter to use; None: the model without an adapter.
            prompt_adapter_request: must be None.
            trace_headers: ignored; the server creates the spans.
            priority: smaller values run first if the scheduling policy is "priority".
            data_parallel_rank: replica that computes the request; None: the one with the least
                load.

        Yields:
            Outputs as they become available; the last one is finished.

        Raises:
            RequestError: the request is not valid.
            CapacityError: it can never fit into the KV cache, or too many requests wait (status
                503).
            RequestTimeoutError: it took longer than the limits allow.
            EngineDeadError: the core has died.
        """
        refuse(prompt_adapter_request=prompt_adapter_request)
        arrival_time = time.time()
        await self.wait_ready()
        if lora_request is not None:  # reads files, so it must not block the event loop
            await self._find_adapter(lora_request)
        # The core reads the media files of the request until the request ends.
        async with self._preparation.media.shared(prompt) as prompt:
            with self._preparing():
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
                stream = self._requests.submit(
                    text, await self._with_grammar(request), data_parallel_rank
                )
            try:
                while True:
                    output = await stream.get()
                    yield output
                    if output.finished:
                        return
            finally:
                if not stream.is_finished:
                    self._requests.abort([request_id])

    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Compute the pooled result of one prompt, with a pooling model.

        Yields:
            The result, once.

        Raises:
            The errors of `generate`.
        """
        refuse(lora_request=lora_request)
        arrival_time = time.time()
        await self.wait_ready()
        async with self._preparation.media.shared(prompt) as prompt:
            with self._preparing():
                text, request = await self._preparation.process(
                    prompt,
                    pooling_params,
                    lambda prompt, processor: processor.pooling.process(
                        request_id,
                        prompt,
                        pooling_params,
                        arrival_time=arrival_time,
                        priority=priority,
                    ),
                )
                stream = self._requests.submit(text, request)
            try:
                yield await stream.get()
            finally:
                if not stream.is_finished:
                    self._requests.abort([request_id])

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests with finish reason "abort"; unknown ids are ignored."""
        if self.startup.is_ready:
            self._requests.abort([request_id] if isinstance(request_id, str) else request_id)

    async def tokenize(
        self, prompt: PromptType, *, is_long: bool = False, max_tokens: int | None = None
    ) -> TokenizedPrompt:
        """Return the token ids of a prompt. For the arguments see `Preparation.tokenize`."""
        with self._preparing():
            return await self._preparation.tokenize(prompt, is_long=is_long, max_tokens=max_tokens)

    async def read_sound(self, source: MediaSource, sampling_rate: int) -> Samples:
        """Read an audio file and return its samples. For the arguments see `AudioReader.read`."""
        with self._preparing():
            return await self._preparation.sound.read(source, sampling_rate)

    async def run_in_background(
        self, work: Callable[[InputProcessor], _Result], num_chars: int = 0
    ) -> _Result:
        """Run slow work that needs a tokenizer in a background thread. See
        `Preparation.run_in_background`.
        """
        with self._preparing():
            return await self._preparation.run_in_background(work, num_chars)

    @contextlib.contextmanager
    def _preparing(self) -> Iterator[None]:
        """Convert errors of threads and processes that `shutdown` has ended meanwhile."""
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            if self._is_shut_down and not isinstance(error, VllmError):
                raise EngineStoppedError(_STOPPED) from error
            raise

    async def _with_grammar(self, request: EngineRequest) -> EngineRequest:
        """Return the request with its compiled grammar, if it asks for structured output."""
        if request.sampling_params.guided_decoding is None:
            return request
        processor = self.input_processor
        cached = processor.attach_cached_grammar(request)
        if cached is not None:
            return cached
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._grammar_threads, processor.attach_grammar, request)

    def _on_output(self, replica: int, message: CoreOutput) -> None:
        self._requests.on_output(replica, message)

    def _on_refused(self, message: Refused) -> None:
        self._requests.on_refused(message)

    def _on_lost(
        self, replica: int, error: BaseException, will_return: bool, core_ids: list[str]
    ) -> None:
        if self.metrics is not None:
            self.metrics.replicas[replica].record_loss(is_restarted=will_return)
        if self.is_loaded:
            self._requests.on_lost(core_ids, error)

    # ---- the engine itself ----------------------------------------------------------------

    @property
    def is_loaded(self) -> bool:
        """Whether the tokenizer and the processors are loaded."""
        return hasattr(self, "_requests")

    @property
    def vllm_config(self) -> VllmConfig:
        """Config of the engine; available after the start has read the model's config."""
        assert self._config is not None, "the engine has not started"
        return self._config

    @property
    def model_config(self) -> ModelConfig:
        """Config of the model; available after the start has read the model's config."""
        return self.vllm_config.model

    @property
    def num_unfinished_requests(self) -> int:
        """Number of requests whose outputs are not complete."""
        return len(self._requests) if self.is_loaded else 0

    # ---- state ----------------------------------------------------------------------------

    @property
    def stats(self) -> SchedulerStats:
        """Latest statistics, summed over all cores."""
        return sum_stats(self._core.stats)

    @property
    def core_pid(self) -> int | None:
        """Process id of the first core; None if it has no process."""
        return self._core.pids[0]

    @property
    def num_restarts_done(self) -> int:
        """Number of times that cores were restarted."""
        return self._core.num_restarts_done

    @property
    def is_running(self) -> bool:
        """Whether the engine is ready to compute requests."""
        return self.startup.is_ready

    @property
    def refusal(self) -> str | None:
        """Reason why the running engine refuses new requests now; None if it accepts them.

        It refuses them while it sleeps, or while all of its replicas are drained.
        """
        return self._core.refusal

    @property
    def is_stopped(self) -> bool:
        """Whether the engine was shut down or has failed."""
        return self._is_shut_down or self.errored

    @property
    def errored(self) -> bool:
        """Whether the engine has failed for good."""
        return self.startup.error is not None

    @property
    def dead_error(self) -> BaseException:
        """The error that stopped the engine."""
        return self._core.dead_error

    async def check_health(self) -> None:
        """Raise an error if the engine has failed. Does nothing if it works or is starting.

        Raises:
            EngineDeadError, ConfigError: the engine has failed.
        """
        if self.startup.error is not None:
            raise self.startup.error

    # ---- settings -------------------------------------------------------------------------

    async def get_vllm_config(self) -> VllmConfig:
        """Return the config of the engine."""
        await self.wait_ready()
        return self.vllm_config

    async def get_model_config(self) -> ModelConfig:
        """Return the config of the model."""
        return (await self.get_vllm_config()).model

    async def get_scheduler_config(self) -> SchedulerConfig:
        """Return the config of the scheduler."""
        return (await self.get_vllm_config()).scheduler

    async def get_parallel_config(self) -> ParallelConfig:
        """Return the config of parallelism."""
        return (await self.get_vllm_config()).parallel

    async def get_decoding_config(self) -> StructuredOutputConfig:
        """Return the config of structured output."""
        return (await self.get_vllm_config()).structured_output

    async def get_lora_config(self) -> LoRAConfig | None:
        """Return the config of LoRA; None if it is off."""
        lora = (await self.get_vllm_config()).lora
        return lora if lora.enable_lora else None

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """The tokenizer, or None."""
        return self.input_processor.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the model's generation_config.json recommends, as a
        new object.
        """
        defaults = {k: v for k, v in self.generation_defaults.items() if k != "eos_token_ids"}
        return SamplingParams.from_optional(**defaults)

    async def get_tokenizer(self, lora_request: Any = None) -> "PreTrainedTokenizerBase":
        """Return the tokenizer, which is the same for every adapter.

        Raises:
            RequestError: the engine runs without a tokenizer.
        """
        await self.wait_ready()
        if self.tokenizer is None:
            raise RequestError("this engine runs without a tokenizer (skip_tokenizer_init)")
        return self.tokenizer

    async def is_tracing_enabled(self) -> bool:
        """Return False, because the server creates the traces of requests."""
        return False

    async def do_log_stats(self, *_: Any) -> None:
        """Log the statistics line now."""
        await self.wait_ready()
        self._stats_log.log()

    # ---- LoRA -----------------------------------------------------------------------------

    async def _find_adapter(self, lora_request: LoRARequest) -> AdapterRef:
        """Find the adapter of a request in a thread, because the files of a new adapter must be
        hashed.
        """
        outputs = self.output_processor
        return await asyncio.to_thread(
            self.input_processor.adapter, lora_request, lambda: outputs.num_unfinished_requests > 0
        )

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before requests use it. Returns False if it is loaded already.

        Raises:
            RequestError: LoRA is off, or the adapter cannot be loaded.
        """
        await self.wait_ready()
        adapter = await self._find_adapter(lora_request)
        found = await self._call_workers(Worker.has_adapter, adapter.number, adapter.key)
        if all(found):
            return False
        while not is_loaded(await self._call_workers(Worker.load_adapter, *call_of(adapter))):
            await asyncio.sleep(POLL_S)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Drop an adapter from memory. It is loaded again when a request uses it.

        Returns:
            False if it is not loaded.

        Raises:
            RequestError: LoRA is off.
        """
        await self.wait_ready()
        check_on(self.vllm_config)
        return any(await self._call_workers(Worker.unload_adapter, lora_id))

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in memory until it is removed.

        Raises:
            RequestError: LoRA is off, the adapter is not loaded, or too many are pinned.
        """
        await self.wait_ready()
        check_on(self.vllm_config)
        answers = await self._call_workers(Worker.pin_adapter, lora_id)
        return check_pinned(lora_id, answers, self.vllm_config)

    async def list_loras(self) -> set[int]:
        """Return the ids (`lora_int_id`) of the adapters in memory."""
        await self.wait_ready()
        if not self.vllm_config.lora.enable_lora:
            return set()
        return set(chain.from_iterable(await self._call_workers(Worker.adapter_numbers)))

    # ---- the core and its workers ---------------------------------------------------------

    async def _call_workers(
        self,
        method: Callable[Concatenate[Worker, _Args], _Result],
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> list[_Result]:
        """Call an internal method, which users may not call, of the workers of all replicas."""
        await self.wait_ready()
        call = method.__name__, list(args), kwargs
        answers = await self._core.calls.call(CoreCalls.call_workers, *call)
        return list(chain.from_iterable(answers))

    async def list_buckets(self) -> list[tuple[int, int, int, int, bool]]:
        """List the buckets of the first replica, which has the same ones as the others.

        Returns:
            (phase, batch size, query length, blocks, whether it is warmed up) of each; empty if the
            device has no buckets.
        """
        found, *_ = await self._call_workers(Worker.list_buckets)
        return found

    async def reset_prefix_cache(self, device: Any = None) -> bool:
        """Empty the prefix cache. Returns False and changes nothing while requests run."""
        await self.wait_ready()
        return all(await self._core.calls.call(CoreCalls.reset_prefix_cache))

    async def reset_mm_cache(self) -> None:
        """Drop the cached images, and the embeddings that no running request reads."""
        await self.wait_ready()
        self._preparation.media.cache.clear()
        await self._core.calls.call(CoreCalls.reset_mm_cache)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker, between two steps.

        Args:
            method: name of a method of the worker or of its `worker_extension_cls`. A function
                cannot be sent to the engine's process.
            timeout: seconds to wait; None: no limit. The call itself is not aborted.
            args, kwargs: arguments of the call: None, numbers, strings, bytes, and lists and dicts
                of these.

        Returns:
            One result per worker, of the same types.

        Raises:
            RequestError: the worker has no such method, or an argument or the result cannot be
                sent.
            WorkerCallError: the method has raised.
            RequestTimeoutError: (a TimeoutError) the call took longer than `timeout`.
            EngineDeadError: the core has died.
        """
        if not isinstance(method, str):
            raise RequestError(
                "collective_rpc takes the name of a method: a function cannot be sent to the "
                "engine's own process. Make it a method of a class, start the engine with "
                "worker_extension_cls='package.module.Class', and call it by its name; the "
                "offline engine (LLM) takes functions",
                param="method",
            )
        await self.wait_ready()
        arguments = list(args), dict(kwargs or {})
        call: Awaitable[list[list[Any]]]
        if method == Worker.reload_weights.__name__:
            # Shielded: the reload is noted when it is complete, even after a timeout.
            call = asyncio.shield(self._core.calls.reload_weights(*arguments))
        else:
            call = self._core.calls.call(CoreCalls.collective_rpc, method, None, *arguments)
        try:
            results = await asyncio.wait_for(call, timeout)
        except asyncio.TimeoutError:
            raise RequestTimeoutError(
                f"collective_rpc {method!r} did not finish within timeout={timeout} s; the "
                f"workers continue the call"
            ) from None
        return [result for of_replica in results for result in of_replica]

    sleep = _of_cores(CoreCalls.sleep, _first)
    wake_up = _of_cores(CoreCalls.wake_up, _first)
    is_sleeping = _of_cores(CoreCalls.is_sleeping, any)

    # ---- replicas -------------------------------------------------------------------------

    def replica_states(self) -> list[ReplicaState]:
        """Return the state of each replica of the engine."""
        return self._core.states()

    async def drain_replica(self, replica: int) -> None:
        """Stop sending requests to a replica, and wait until it has none.

        Raises:
            RequestError: there is no such replica.
            CapacityError: it was resumed before its last request had ended (status 409).
        """
        await self.wait_ready()
        await self._core.drain(replica)

    async def resume_replica(self, replica: int) -> None:
        """Send requests to a replica again.

        Raises:
            RequestError: there is no such replica.
        """
        await self.wait_ready()
        self._core.resume(replica)

    async def restart_replica(self, replica: int, timeout: float | None = None) -> None:
        """Drain a replica and replace its process, while the other replicas keep serving.

        Args:
            replica: index of the replica, which may have died.
            timeout: seconds for its requests to finish; requests that are left then fail with an
                error. None: no limit.

        Raises:
            RequestError: there is no such replica.
            CapacityError: it is being started already, or was resumed before its last request had
                ended (status 409).
            ConfigError, EngineDeadError: it could not be started.
        """
        await self.wait_ready()
        await self._core.restart(replica, timeout)

    async def start_profile(self) -> None:
        """Start a profiler trace of the workers, in the folder VLLM_TORCH_PROFILER_DIR.

        Raises:
            RequestError: the variable is not set, or a trace is being recorded already.
        """
        await self._call_workers(Worker.start_profile)

    async def stop_profile(self) -> list[str]:
        """Stop the profiler trace and write it; returns when the file is complete.

        Returns:
            One sentence for each replica without a trace, for example because it was restarted
            meanwhile. The sentences are also logged.

        Raises:
            RequestError: no trace is being recorded.
        """
        await self.wait_ready()
        missing = await self._core.calls.stop_profile()
        for sentence in missing:
            logger.warning("%s", sentence)
        return missing


def _replicas(engine_args: "EngineArgs | None", config: VllmConfig | None) -> ParallelConfig:
    """Return how many cores to start, and where. A wrong value is reported later, when the config
    is created.
    """
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
