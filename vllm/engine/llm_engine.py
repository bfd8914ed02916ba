"""Run the synchronous engine: requests in, `RequestOutput`s out, one step at a time.

It connects three parts: `InputProcessor` checks and tokenises requests, the engine core computes
tokens, `OutputProcessor` creates text. Not thread-safe.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from vllm.config import LoRAConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.config.structured_output import StructuredOutputConfig
from vllm.engine.adapter_calls import POLL_S, call_of, check_on, check_pinned, is_loaded
from vllm.engine.fan_out import fan_out
from vllm.engine.input.input_processor import InputProcessor
from vllm.engine.metrics.engine_metrics import EngineMetrics
from vllm.engine.metrics.reader import Metric, read_metrics
from vllm.engine.metrics.stats_log import StatsLog
from vllm.engine.metrics.traffic_metrics import TrafficFile
from vllm.engine.older_names import ModelExecutor, TokenizerGroup
from vllm.engine.output.output_processor import OutputProcessor
from vllm.engine.output.stats_recorder import StatsRecorder
from vllm.engine.process.core_calls import CoreCalls
from vllm.engine.unavailable import refuse
from vllm.errors import ConfigError, EngineDeadError, RequestError
from vllm.executor import Worker
from vllm.inputs import PromptType
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.messages import EngineRequest
from vllm.outputs import AnyRequestOutput
from vllm.platforms import resolve_platform
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.utils.clean_up import on_failure
from vllm.utils.imports import load_class
from vllm.utils.methods import passed_on

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vllm.engine.arg_utils import EngineArgs
    from vllm.engine.engine_core import EngineCore

logger = init_logger(__name__)

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def _core_of(engine: "LLMEngine") -> "EngineCore":
    """Return the core of an engine that is not shut down.

    Raises:
        EngineDeadError: it was shut down.
    """
    engine.check_health()
    return engine.engine_core


class LLMEngine:
    """The synchronous engine: queues requests, and computes them step by step.

    Args:
        config: complete and consistent config.
        core: computes the requests; the engine shuts it down.
        tokenizer: tokenizer of the model; None: only token ids are accepted.
        generation_defaults: defaults from the model's generation_config.json.

    Attributes:
        vllm_config, model_config, cache_config, scheduler_config, parallel_config,
        device_config, load_config: the configs of the engine.
        metrics: the metrics; None with `disable_log_stats`, unless traffic is recorded.
    """

    def __init__(
        self,
        config: VllmConfig,
        core: "EngineCore",
        tokenizer: "PreTrainedTokenizerBase | None",
        generation_defaults: Mapping[str, Any],
    ) -> None:
        # The number of blocks is only known now; the core and its workers do not read it here.
        cache = replace(config.cache, num_gpu_blocks=core.stats().num_kv_blocks)
        self.vllm_config = config = replace(config, cache=cache)
        self.model_config = config.model
        self.cache_config = config.cache
        self.scheduler_config = config.scheduler
        self.parallel_config = config.parallel
        self.device_config = config.device
        self.load_config = config.load
        self.generation_defaults = dict(generation_defaults)
        self.engine_core = core
        self.input_processor = InputProcessor(config, tokenizer, generation_defaults)
        self.metrics: EngineMetrics | None = None
        self._recorder: StatsRecorder | None = None
        recorded = config.observability.record_traffic
        self._traffic_file: TrafficFile | None = None
        if not config.observability.disable_log_stats or recorded is not None:
            name = (config.model.served_model_name or (config.model.model,))[0]
            self.metrics = EngineMetrics(name, config)
            self._recorder = StatsRecorder(self.metrics)
            self._stats_log = StatsLog(self.metrics)
            if recorded is not None:
                self._traffic_file = TrafficFile(Path(recorded), self.metrics)
                self._traffic_file.note_engine(
                    core.call_workers(Worker.describe_engine.__name__)[0]
                )
                weakref.finalize(self, self._traffic_file.write)
        self.output_processor = OutputProcessor(tokenizer, self._recorder)
        # `finalize` runs when the engine is garbage-collected or when the interpreter exits,
        # whichever is first.
        self._release = weakref.finalize(self, core.shutdown)

    @classmethod
    def from_engine_args(
        cls, engine_args: "EngineArgs", usage_context: Any = None, stat_loggers: Any = None
    ) -> "LLMEngine":
        """Load an engine with the given arguments.

        Args:
            engine_args: arguments of the engine.
            usage_context, stat_loggers: ignored.

        Raises:
            ConfigError: the engine cannot start with the arguments.
        """
        if engine_args.data_parallel_size != 1:
            raise ConfigError(
                f"data_parallel_size={engine_args.data_parallel_size}: LLM runs one replica in "
                "one process. Leave it out, or run `vllm serve` or `vllm run-batch`"
            )
        if engine_args.adapt_buckets:
            raise ConfigError(
                "adapt_buckets=True works only in a server, because LLM does not observe its "
                "traffic. Leave it out, or run `vllm serve`"
            )
        began = time.monotonic()
        engine = cls.from_vllm_config(engine_args.create_engine_config())
        logger.info("ready in %.1f s: %s", time.monotonic() - began, engine.vllm_config.summary)
        return engine

    @classmethod
    def from_vllm_config(cls, config: VllmConfig) -> "LLMEngine":
        """Create an engine, and load the model and the tokenizer.

        Raises:
            ConfigError: one of them cannot be loaded.
        """
        from vllm.engine.engine_core import EngineCore
        from vllm.transformers_utils.generation_config import load_generation_defaults
        from vllm.transformers_utils.tokenizer import load_tokenizer

        generation_defaults = load_generation_defaults(config.model)
        # Load the tokenizer while the worker imports its modules, and before the weights. Weights
        # may take minutes, which would be wasted if the tokenizer cannot be loaded.
        with ThreadPoolExecutor(1, "tokenizer") as pool:
            loading = pool.submit(load_tokenizer, config.model)
            load_class(resolve_platform(config.device.device).worker_class)
        tokenizer = loading.result()
        core = EngineCore(config)
        with on_failure(core.shutdown):
            return cls(config, core, tokenizer, generation_defaults)

    # ---- requests -------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        *,
        priority: int = 0,
    ) -> None:
        """Queue a request. If it is refused, nothing changes.

        Args:
            request_id: id that is returned in the outputs; may be used again when the request has
                finished.
            prompt: prompt of any type.
            params: sampling or pooling parameters; the object may be used for several requests.
            arrival_time: arrival in seconds of `time.time()`; None: now.
            lora_request: the adapter to use; None: the model without an adapter.
            priority: smaller values run first if the scheduling policy is "priority".

        Raises:
            RequestError: the request is not valid.
            CapacityError: it can never fit into the KV cache.
            EngineDeadError: the engine was shut down or has failed.
        """
        processor = self.input_processor
        if isinstance(params, PoolingParams):
            refuse(lora_request=lora_request)
            text, request = processor.pooling.process(
                request_id, prompt, params, arrival_time=arrival_time, priority=priority
            )
        else:
            text, request = processor.process(
                request_id,
                prompt,
                params,
                arrival_time=arrival_time,
                priority=priority,
                lora_request=lora_request,
            )
        self.submit(text, request)

    def submit(self, prompt_text: str | None, request: EngineRequest) -> None:
        """Queue a request that `input_processor.process` returned.

        Raises:
            The errors of `add_request`.
        """
        self.check_health()
        request = self.input_processor.attach_grammar(request)
        core_requests = fan_out(request)
        core_ids = [core_request.request_id for core_request in core_requests]
        self.output_processor.add_request(
            request.request_id, prompt_text, request.sampling_params, core_requests
        )
        try:
            for core_request in core_requests:
                self.engine_core.add_request(core_request)
        except BaseException:
            self.output_processor.abort([request.request_id])
            self.engine_core.abort_requests(core_ids)
            raise

    def abort_request(self, request_id: str | Iterable[str]) -> list[AnyRequestOutput]:
        """Abort requests with finish reason "abort"; unknown ids are ignored.

        Returns:
            Their last outputs, which `step` will not return.
        """
        request_ids = [request_id] if isinstance(request_id, str) else request_id
        outputs, core_ids = self.output_processor.abort(request_ids)
        if core_ids:
            self.engine_core.abort_requests(core_ids)
        return outputs

    def step(self) -> list[AnyRequestOutput]:
        """Run one step for all requests that can run.

        Returns:
            Outputs of the requests with new tokens, as their `output_kind` requires; empty if there
            is nothing new. A request that has ended is included once, as finished.

        Raises:
            EngineDeadError: the engine was shut down or has failed.
        """
        self.check_health()
        outputs, stopped = self.output_processor.process(self.engine_core.step())
        if stopped:
            self.engine_core.abort_requests(stopped)
        if self._recorder is not None:
            self._recorder.end_message(self.engine_core.stats())
        if self._traffic_file is not None:
            self._traffic_file.write_if_due()
        if self.has_unfinished_requests() and not self.engine_core.has_unfinished_requests():
            # Raise, because without these requests in the core, the caller would wait forever.
            lost = ", ".join(self.output_processor.unfinished_request_ids)
            raise EngineDeadError(
                f"the engine core has no work left, but these requests have not finished: {lost}"
            )
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Return whether any request has not ended."""
        return self.output_processor.num_unfinished_requests > 0

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that have not finished. A request with several samples
        counts once.
        """
        return self.output_processor.num_unfinished_requests

    # ---- settings -------------------------------------------------------------------------

    def get_vllm_config(self) -> VllmConfig:
        """Return the config of the engine."""
        return self.vllm_config

    def get_model_config(self) -> ModelConfig:
        """Return the config of the model."""
        return self.vllm_config.model

    def get_scheduler_config(self) -> SchedulerConfig:
        """Return the config of the scheduler."""
        return self.vllm_config.scheduler

    def get_parallel_config(self) -> ParallelConfig:
        """Return the config of parallelism."""
        return self.vllm_config.parallel

    def get_decoding_config(self) -> StructuredOutputConfig:
        """Return the config of structured output."""
        return self.vllm_config.structured_output

    def get_lora_config(self) -> LoRAConfig | None:
        """Return the config of LoRA; None if it is off."""
        return self.vllm_config.lora if self.vllm_config.lora.enable_lora else None

    def get_tokenizer_group(self) -> TokenizerGroup:
        """Return an object with the tokenizer, which is used for all requests, with and without
        adapters.

        Raises:
            RequestError: the engine runs without a tokenizer.
        """
        self.get_tokenizer()
        return TokenizerGroup(self)

    def is_tracing_enabled(self) -> bool:
        """Return False, because the server creates the traces of requests."""
        return False

    # ---- statistics -----------------------------------------------------------------------

    def get_metrics(self) -> list[Metric]:
        """Return the metrics since the engine started, as a server shows them at /metrics.

        Raises:
            RequestError: the engine collects no metrics, because `disable_log_stats` is True.
        """
        if self.metrics is None:
            raise RequestError(
                "get_metrics: this engine collects no metrics, because disable_log_stats is True "
                "(the default of LLM). Create the engine with disable_log_stats=False"
            )
        return read_metrics(self.metrics)

    def do_log_stats(self) -> None:
        """Log the statistics since the last call, unless the engine was idle. Does nothing if
        `disable_log_stats` is True.
        """
        if self.metrics is not None:
            self._stats_log.log()

    # ---- LoRA -----------------------------------------------------------------------------

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before requests use it. Returns False if it is loaded already.

        Raises:
            RequestError: LoRA is off, or the adapter cannot be loaded.
        """
        adapter = self.input_processor.adapter(lora_request)
        if all(self._call_workers(Worker.has_adapter, adapter.number, adapter.key)):
            return False
        while not is_loaded(self._call_workers(Worker.load_adapter, *call_of(adapter))):
            time.sleep(POLL_S)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Drop an adapter from memory. It is loaded again when a request uses it.

        Returns:
            False if it is not loaded.

        Raises:
            RequestError: LoRA is off.
        """
        check_on(self.vllm_config)
        return any(self._call_workers(Worker.unload_adapter, lora_id))

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in memory until it is removed.

        Raises:
            RequestError: LoRA is off, the adapter is not loaded, or too many are pinned.
        """
        check_on(self.vllm_config)
        answers = self._call_workers(Worker.pin_adapter, lora_id)
        return check_pinned(lora_id, answers, self.vllm_config)

    def list_loras(self) -> set[int]:
        """Return the ids (`lora_int_id`) of the adapters in memory."""
        if not self.vllm_config.lora.enable_lora:
            return set()
        return set(chain.from_iterable(self._call_workers(Worker.adapter_numbers)))

    # ---- the core and its workers ---------------------------------------------------------

    collective_rpc = passed_on(CoreCalls.collective_rpc, _core_of)
    sleep = passed_on(CoreCalls.sleep, _core_of)
    wake_up = passed_on(CoreCalls.wake_up, _core_of)

    def is_sleeping(self) -> bool:
        """Return whether the memory of weights or KV cache is released."""
        return self.engine_core.is_sleeping()

    def start_profile(self) -> None:
        """Start a profiler trace of the workers, in the folder VLLM_TORCH_PROFILER_DIR.

        Raises:
            RequestError: the variable is not set, or a trace is being recorded already.
        """
        self._call_workers(Worker.start_profile)

    def stop_profile(self) -> None:
        """Stop the profiler trace and write it; returns when the file is complete.

        Raises:
            RequestError: no trace is being recorded.
        """
        self._call_workers(Worker.stop_profile)

    def _call_workers(
        self,
        method: Callable[Concatenate[Worker, _Args], _Result],
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> list[_Result]:
        """Call an internal method, which users may not call, of every worker."""
        self.check_health()
        return self.engine_core.call_workers(method.__name__, args, kwargs)

    def reset_prefix_cache(self, device: Any = None) -> bool:
        """Empty the prefix cache. Returns False and changes nothing while requests run."""
        return self.engine_core.reset_prefix_cache()

    def reset_mm_cache(self) -> bool:
        """Drop the embeddings of images that no running request reads. Returns True."""
        return self.engine_core.reset_mm_cache()

    # ---- the engine itself ----------------------------------------------------------------

    @property
    def tokenizer(self) -> TokenizerGroup | None:
        """The tokenizer as in vLLM: itself and also its attribute `tokenizer`. None: there is
        none.
        """
        return None if self.input_processor.tokenizer is None else TokenizerGroup(self)

    @property
    def model_executor(self) -> ModelExecutor:
        """An object for programs that end the engine by deleting it, or by its `shutdown`."""
        return ModelExecutor(self)

    @model_executor.deleter
    def model_executor(self) -> None:
        self.shutdown()

    def get_tokenizer(self, lora_request: Any = None) -> "PreTrainedTokenizerBase":
        """Return the tokenizer, which is the same for every adapter.

        Raises:
            RequestError: the engine runs without a tokenizer.
        """
        tokenizer = self.input_processor.tokenizer
        if tokenizer is None:
            raise RequestError("this engine runs without a tokenizer (skip_tokenizer_init)")
        return tokenizer

    def set_tokenizer(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Use another tokenizer for new requests."""
        self.input_processor.tokenizer = tokenizer
        self.output_processor.set_tokenizer(tokenizer)

    def check_health(self) -> None:
        """Raise an error if the engine cannot serve requests.

        Raises:
            EngineDeadError: it was shut down.
        """
        if not self._release.alive:
            raise EngineDeadError("the engine was shut down")

    def shutdown(self) -> None:
        """Abort all requests and release the device. A second call does nothing."""
        if self._release.alive:
            self.abort_request(self.output_processor.unfinished_request_ids)
            if self._traffic_file is not None:
                self._traffic_file.write()
        self._release()
