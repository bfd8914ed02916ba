"""Methods of `LLMEngine` that are not about requests: settings, and calls to the workers."""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from vllm.config import LoRAConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.config.structured_output import StructuredOutputConfig
from vllm.engine.adapter_calls import POLL_S, call_of, check_on, check_pinned, is_loaded
from vllm.engine.input.input_processor import InputProcessor
from vllm.engine.metrics.engine_metrics import EngineMetrics
from vllm.engine.metrics.reader import Metric, read_metrics
from vllm.engine.metrics.stats_log import StatsLog
from vllm.errors import RequestError
from vllm.executor import Worker, WorkerMethod
from vllm.lora.request import LoRARequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class ControlledCore(Protocol):
    """The methods of the core that `EngineControl` uses; see `EngineCore`."""

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False if requests use it."""
        ...

    def collective_rpc(
        self,
        method: WorkerMethod,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker."""
        ...

    def call_workers(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of every worker, for the engine itself."""
        ...

    def sleep(self, level: int = 1) -> None:
        """Release the memory of weights and KV cache."""
        ...

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory again."""
        ...

    def is_sleeping(self) -> bool:
        """Whether some of the memory is released."""
        ...


class EngineControl:
    """Mixed into `LLMEngine`, which has the engine core."""

    vllm_config: VllmConfig
    engine_core: ControlledCore
    input_processor: InputProcessor
    metrics: EngineMetrics | None
    _stats_log: StatsLog

    if TYPE_CHECKING:

        def check_health(self) -> None: ...

        def get_tokenizer(self) -> "PreTrainedTokenizerBase": ...

    # ---- settings -------------------------------------------------------------------------

    def get_vllm_config(self) -> VllmConfig:
        """The config of the engine."""
        return self.vllm_config

    def get_model_config(self) -> ModelConfig:
        """The model's part of the config."""
        return self.vllm_config.model

    def get_scheduler_config(self) -> SchedulerConfig:
        """The scheduler's part of the config."""
        return self.vllm_config.scheduler

    def get_parallel_config(self) -> ParallelConfig:
        """The config of parallelism."""
        return self.vllm_config.parallel

    def get_decoding_config(self) -> StructuredOutputConfig:
        """The part of the config about structured output."""
        return self.vllm_config.structured_output

    def get_lora_config(self) -> LoRAConfig | None:
        """The config of LoRA; None if it is off."""
        return self.vllm_config.lora if self.vllm_config.lora.enable_lora else None

    def get_tokenizer_group(self) -> "PreTrainedTokenizerBase":
        """The tokenizer, which all requests use, those with adapters too.

        Raises:
            RequestError: the engine runs without a tokenizer.
        """
        return self.get_tokenizer()

    def is_tracing_enabled(self) -> bool:
        """False: the server makes the traces of requests."""
        return False

    # ---- statistics -----------------------------------------------------------------------

    def get_metrics(self) -> list[Metric]:
        """The metrics since the engine started: those of a server's /metrics.

        Raises:
            RequestError: the engine collects no metrics, as `disable_log_stats` is True.
        """
        if self.metrics is None:
            raise RequestError(
                "get_metrics: this engine collects no metrics, as disable_log_stats is True (the "
                "default of LLM). Create the engine with disable_log_stats=False"
            )
        return read_metrics(self.metrics)

    def do_log_stats(self) -> None:
        """Log statistics since the last call, unless the engine was idle; does nothing with
        `disable_log_stats`."""
        if self.metrics is not None:
            self._stats_log.log()

    # ---- LoRA -----------------------------------------------------------------------------

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before requests name it. Returns False if it is loaded already.

        Raises:
            RequestError: LoRA is off, or the adapter cannot be loaded.
        """
        adapter = self.input_processor.adapter(lora_request)
        if all(self._call_workers(Worker.has_adapter, adapter.number, adapter.key)):
            return False
        while not is_loaded(adapter, self._call_workers(Worker.load_adapter, *call_of(adapter))):
            time.sleep(POLL_S)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Drop an adapter from memory; it is loaded again when a request names it. Returns False if
        it is not loaded.

        Raises:
            RequestError: LoRA is off.
        """
        check_on(self.vllm_config, "lora_id")
        return any(self._call_workers(Worker.unload_adapter, lora_id))

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in memory until it is removed.

        Raises:
            RequestError: LoRA is off, the adapter is not loaded, or too many are pinned.
        """
        check_on(self.vllm_config, "lora_id")
        answers = self._call_workers(Worker.pin_adapter, lora_id)
        return check_pinned(lora_id, answers, self.vllm_config)

    def list_loras(self) -> set[int]:
        """The numbers (`lora_int_id`) of the adapters in memory."""
        if not self.vllm_config.lora.enable_lora:
            return set()
        return set(chain.from_iterable(self._call_workers(Worker.adapter_numbers)))

    # ---- the core and its workers ---------------------------------------------------------

    def _call_workers(
        self,
        method: Callable[Concatenate[Worker, _Args], _Result],
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> list[_Result]:
        """Call a method of every worker that users may not call."""
        self.check_health()
        return self.engine_core.call_workers(method.__name__, args, kwargs)

    def reset_prefix_cache(self, device: Any = None) -> bool:
        """Empty the prefix cache. Returns False and changes nothing while requests run."""
        return self.engine_core.reset_prefix_cache()

    def reset_mm_cache(self) -> bool:
        """Return True: this version reads text only, so there is no such cache."""
        return True

    def collective_rpc(
        self,
        method: WorkerMethod,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker, between two steps.

        Args:
            method: name of a method of the worker or of its `worker_extension_cls`; or a
                function, which gets the worker as its first argument.
            timeout: seconds to wait; None waits without limit. It only has an effect if steps run
                in a thread; the call itself is not ended.
            args, kwargs: of the call.

        Returns:
            One result per worker.

        Raises:
            RequestError: the workers have no such method.
            TimeoutError: the call took longer than `timeout`.
            EngineDeadError: the engine was shut down or has failed.
        """
        self.check_health()
        return self.engine_core.collective_rpc(method, timeout, args, kwargs)

    def sleep(self, level: int = 1) -> None:
        """Release the memory of weights and KV cache until `wake_up`.

        Cached prefixes are dropped, and requests are refused meanwhile. Needs
        `enable_sleep_mode`.

        Args:
            level: 1 keeps the content of the weights; 2 keeps nothing, and `wake_up` reads the
                checkpoint again. See docs/engine_control.md.

        Raises:
            RequestError: sleep mode is off, or there is no such level.
            CapacityError: requests have not ended.
            EngineDeadError: the engine was shut down or has failed.
        """
        self.check_health()
        self.engine_core.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory again. Requests are accepted when all of it is allocated.

        Args:
            tags: "weights", "kv_cache" or both; None is both.

        Raises:
            RequestError: sleep mode is off, or there is no such tag.
            WeightLoadError: the weights cannot be read again; they still sleep.
            EngineDeadError: the engine was shut down or has failed.
        """
        self.check_health()
        self.engine_core.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether the memory of weights or KV cache is released."""
        return self.engine_core.is_sleeping()

    def start_profile(self) -> None:
        """Begin a trace of what the workers compute, in the folder VLLM_TORCH_PROFILER_DIR.

        Raises:
            RequestError: that is not set, or a trace is being recorded already.
        """
        self.collective_rpc("start_profile")

    def stop_profile(self) -> None:
        """End the trace and write it; returns when the file is complete.

        Raises:
            RequestError: no trace is being recorded.
        """
        self.collective_rpc("stop_profile")
