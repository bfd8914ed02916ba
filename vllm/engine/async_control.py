"""Methods of `AsyncLLM` that are not about requests: settings, tokenizer, statistics, and calls to
the workers.

The getters of settings are coroutines, because programs await them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from vllm.config import LoRAConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.config.structured_output import StructuredOutputConfig
from vllm.engine.adapter_calls import POLL_S, call_of, check_on, check_pinned, is_loaded
from vllm.engine.input.input_processor import InputProcessor
from vllm.engine.metrics.replica_metrics import sum_stats
from vllm.engine.output.output_processor import OutputProcessor
from vllm.engine.process.core_replicas import CoreReplicas, ReplicaState
from vllm.engine.process.startup_state import StartupState
from vllm.errors import RequestError, RequestTimeoutError
from vllm.executor import Worker
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.messages import AdapterRef, SchedulerStats
from vllm.sampling_params import SamplingParams

logger = init_logger(__name__)

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vllm.engine.metrics.stats_log import StatsLog


class AsyncControl:
    """Mixed into `AsyncLLM`, which has the engine core."""

    _core: CoreReplicas
    _stats_log: "StatsLog"

    _is_shut_down: bool
    input_processor: InputProcessor
    output_processor: OutputProcessor
    generation_defaults: dict[str, Any]

    if TYPE_CHECKING:

        @property
        def startup(self) -> StartupState: ...

        @property
        def vllm_config(self) -> VllmConfig: ...

        async def wait_ready(self) -> None: ...

    # ---- state ----------------------------------------------------------------------------

    @property
    def stats(self) -> SchedulerStats:
        """The latest statistics of all cores together."""
        return sum_stats(self._core.stats)

    @property
    def core_pids(self) -> list[int | None]:
        """Process ids of the cores, replica by replica."""
        return self._core.pids

    @property
    def core_pid(self) -> int | None:
        """Process id of the first core, or None."""
        return self._core.pids[0]

    @property
    def num_restarts_done(self) -> int:
        """How often cores were restarted."""
        return self._core.num_restarts_done

    @property
    def is_running(self) -> bool:
        """Whether requests are computed."""
        return self.startup.is_ready

    @property
    def refusal(self) -> str | None:
        """Why the running engine refuses new requests now: it sleeps, or all of its replicas are
        being drained. None: it takes them."""
        return self._core.refusal

    @property
    def is_stopped(self) -> bool:
        """Whether it was shut down or has failed."""
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
        """Raise an error if the engine cannot serve; do nothing if it can or is starting.

        Raises:
            EngineDeadError, ConfigError: it cannot.
        """
        if self.startup.error is not None:
            raise self.startup.error

    # ---- settings -------------------------------------------------------------------------

    async def get_vllm_config(self) -> VllmConfig:
        """The config of the engine."""
        await self.wait_ready()
        return self.vllm_config

    async def get_model_config(self) -> ModelConfig:
        """The model's part of the config."""
        return (await self.get_vllm_config()).model

    async def get_scheduler_config(self) -> SchedulerConfig:
        """The scheduler's part of the config."""
        return (await self.get_vllm_config()).scheduler

    async def get_parallel_config(self) -> ParallelConfig:
        """The config of parallelism."""
        return (await self.get_vllm_config()).parallel

    async def get_decoding_config(self) -> StructuredOutputConfig:
        """The part of the config about structured output."""
        return (await self.get_vllm_config()).structured_output

    async def get_lora_config(self) -> LoRAConfig | None:
        """The config of LoRA; None if it is off."""
        lora = (await self.get_vllm_config()).lora
        return lora if lora.enable_lora else None

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """The tokenizer, or None."""
        return self.input_processor.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends; a new object each time."""
        defaults = {k: v for k, v in self.generation_defaults.items() if k != "eos_token_ids"}
        return SamplingParams.from_optional(**defaults)

    async def get_tokenizer(self, lora_request: Any = None) -> "PreTrainedTokenizerBase":
        """The tokenizer; every adapter has the same one.

        Raises:
            RequestError: the engine runs without a tokenizer.
        """
        await self.wait_ready()
        if self.tokenizer is None:
            raise RequestError("this engine runs without a tokenizer (skip_tokenizer_init)")
        return self.tokenizer

    async def is_tracing_enabled(self) -> bool:
        """False: the server makes the traces of requests."""
        return False

    async def do_log_stats(self, *_: Any) -> None:
        """Log the line of statistics now."""
        await self.wait_ready()
        self._stats_log.log()

    # ---- LoRA -----------------------------------------------------------------------------

    async def _find_adapter(self, lora_request: LoRARequest) -> AdapterRef:
        """`InputProcessor.adapter` in a thread, as a new adapter has files to hash."""
        outputs = self.output_processor
        return await asyncio.to_thread(
            self.input_processor.adapter,
            lora_request,
            lambda: outputs.num_unfinished_requests > 0,
        )

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before requests name it. Returns False if it is loaded already.

        Raises:
            RequestError: LoRA is off, or the adapter cannot be loaded.
        """
        await self.wait_ready()
        adapter = await self._find_adapter(lora_request)
        found = await self._call_workers(Worker.has_adapter, adapter.number, adapter.key)
        if all(found):
            return False
        while not is_loaded(
            adapter, await self._call_workers(Worker.load_adapter, *call_of(adapter))
        ):
            await asyncio.sleep(POLL_S)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Drop an adapter from memory; it is loaded again when a request names it. Returns False if
        it is not loaded.

        Raises:
            RequestError: LoRA is off.
        """
        await self.wait_ready()
        check_on(self.vllm_config, "lora_id")
        return any(await self._call_workers(Worker.unload_adapter, lora_id))

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in memory until it is removed.

        Raises:
            RequestError: LoRA is off, the adapter is not loaded, or too many are pinned.
        """
        await self.wait_ready()
        check_on(self.vllm_config, "lora_id")
        answers = await self._call_workers(Worker.pin_adapter, lora_id)
        return check_pinned(lora_id, answers, self.vllm_config)

    async def list_loras(self) -> set[int]:
        """The numbers (`lora_int_id`) of the adapters in memory."""
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
        """Call a method of the workers of all replicas that users may not call."""
        call = method.__name__, list(args), kwargs
        return list(chain.from_iterable(await self._core.calls.call("call_workers", *call)))

    async def reset_prefix_cache(self, device: Any = None) -> bool:
        """Empty the prefix cache. Returns False and changes nothing while requests run."""
        await self.wait_ready()
        is_done = all(await self._core.calls.call("reset_prefix_cache"))
        self._core.forget_prefixes()
        return is_done

    async def reset_mm_cache(self) -> None:
        """Do nothing: this version reads text only, so there is no such cache."""

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
            timeout: seconds to wait; None waits without limit. The call itself is not ended.
            args, kwargs: of the call: None, numbers, text, bytes, and lists and dicts of these.

        Returns:
            One result per worker, made of the same types.

        Raises:
            RequestError: there is no such method, or an argument or the result cannot be sent.
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
        if method == "reload_weights":
            # It is noted when it is done, after a timeout too.
            call = asyncio.shield(self._core.calls.reload_weights(*arguments))
        else:
            call = self._core.calls.call("collective_rpc", method, None, *arguments)
        try:
            results = await asyncio.wait_for(call, timeout)
        except asyncio.TimeoutError:
            raise RequestTimeoutError(
                f"collective_rpc {method!r} did not finish within timeout={timeout} s; the "
                f"workers continue the call"
            ) from None
        return [result for of_replica in results for result in of_replica]

    async def sleep(self, level: int = 1) -> None:
        """Release the memory of weights and KV cache until `wake_up`.

        Cached prefixes are dropped, and requests are refused meanwhile (status 503). Needs
        `enable_sleep_mode`.

        Args:
            level: 1 keeps the content of the weights; 2 keeps nothing, and `wake_up` reads the
                checkpoint again. See docs/engine_control.md.

        Raises:
            RequestError: sleep mode is off, or there is no such level.
            CapacityError: requests have not ended (status 409).
            EngineDeadError: the core has died.
        """
        await self.wait_ready()
        await self._core.calls.sleep(level)
        self._core.forget_prefixes()

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory again. Requests are accepted when all of it is allocated.

        Args:
            tags: "weights", "kv_cache" or both; None is both.

        Raises:
            RequestError: sleep mode is off, or there is no such tag.
            WorkerCallError: the weights cannot be read again; they still sleep.
            EngineDeadError: the core has died.
        """
        await self.wait_ready()
        await self._core.calls.wake_up(tags if tags is None else list(tags))

    async def is_sleeping(self) -> bool:
        """Whether the memory of weights or KV cache is released."""
        await self.wait_ready()
        return any(await self._core.calls.call("is_sleeping"))

    # ---- replicas -------------------------------------------------------------------------

    def replica_states(self) -> list[ReplicaState]:
        """What each replica of the engine does."""
        return self._core.states()

    async def drain_replica(self, replica: int) -> None:
        """Send no more requests to a replica, and wait until it has none.

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
        """Drain a replica and replace its process, while the others serve.

        Args:
            replica: index of the replica, which may have died.
            timeout: seconds for its requests to end; those that have not ended then end with an
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
        """Begin a trace of what the workers compute, in the folder VLLM_TORCH_PROFILER_DIR.

        Raises:
            RequestError: that is not set, or a trace is being recorded already.
        """
        await self.collective_rpc("start_profile")

    async def stop_profile(self) -> list[str]:
        """End the trace and write it; returns when the file is complete.

        Returns:
            A sentence about each replica that has no trace, such as one that was started again
            meanwhile. They are logged, too.

        Raises:
            RequestError: no trace is being recorded.
        """
        await self.wait_ready()
        missing = await self._core.calls.stop_profile()
        for sentence in missing:
            logger.warning("%s", sentence)
        return missing
