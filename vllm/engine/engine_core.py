"""Run the engine's loop: schedule, execute, update. Independent of text, HTTP and devices."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from vllm.config import VllmConfig
from vllm.core.draft_sources import make_drafts
from vllm.core.kv.cache_events import CacheEventLog
from vllm.core.kv.kv_cache_manager import KVCacheManager
from vllm.core.kv.state_cache import StateCache
from vllm.core.media import EncoderCache
from vllm.core.pacing.step_bound import StepBound
from vllm.core.scheduler import Scheduler
from vllm.distributed.kv_transfer import KVConnector
from vllm.distributed.kv_transfer.choose import make_connector
from vllm.engine.async_scheduling import AsyncSchedulingPolicy
from vllm.engine.background_warm_up import BackgroundWarmUp
from vllm.engine.input.named_processors import NamedProcessors
from vllm.engine.kv_event_publisher import KVEventPublisher
from vllm.engine.kv_transfer import KVTransfer
from vllm.engine.process.core_calls import CoreCalls
from vllm.engine.request_resources import RequestResources
from vllm.errors import (
    CapacityError,
    ConfigError,
    EngineAsleepError,
    EngineDeadError,
    RequestError,
    VllmError,
)
from vllm.executor import Executor, StepHandleLike, Worker, WorkerMethod, make_executor
from vllm.executor.ranks.worker_call import refuse_engine_method
from vllm.kv_cache_spec import KVCacheGroup
from vllm.logger import init_logger
from vllm.messages import (
    EngineOutput,
    EngineRequest,
    ModelRunnerOutput,
    SchedulerStats,
    TransferStats,
)
from vllm.utils.clean_up import on_failure
from vllm.utils.futures import wait_all
from vllm.utils.trace import cache_counters, get_trace, open_trace, set_trace

logger = init_logger(__name__)

_Argument = TypeVar("_Argument")

_IDLE = EngineOutput()

_PREPARE_WAIT_S = 0.02


class EngineCore(CoreCalls):
    """Drives a scheduler and the workers of one engine.

    Args:
        config: complete and consistent config.
        executor: executor of the workers, which this starts; None: the one that `config` asks for.
        async_scheduling: whether to schedule ahead; None: as `config` says, if the executor
            supports it
            and it is worthwhile.
    """

    def __init__(
        self,
        config: VllmConfig,
        executor: Executor | None = None,
        async_scheduling: AsyncSchedulingPolicy | None = None,
    ) -> None:
        self.config = config
        if config.observability.profiler_enabled:
            set_trace(open_trace(Path.cwd()))
        self._publisher: KVEventPublisher | None = None
        self._events: CacheEventLog | None = None
        if config.observability.kv_events.is_published:
            # Open the publisher before the model is loaded, so that an address in use is reported
            # at once.
            self._publisher = KVEventPublisher(config.observability.kv_events)
            self._events = CacheEventLog(config.cache.block_size)
            # Subscribers may still list blocks of an engine that ran here before.
            self._events.cleared()
        with on_failure(self._close_publisher):
            # The connector too, for the same reason: its address or folder may not be usable.
            self._connector = _make_connector(config)
        with on_failure(self._close_connections):
            self.executor = make_executor(config) if executor is None else executor
            num_blocks = self.executor.start()
            self._is_measuring = config.model.is_measured
            if self._is_measuring:  # warm-up and profiling ran without requests
                self.executor.call(Worker.reset_measurements)
            self._has_measured = False
        num_kept = self.executor.num_kept_states
        cache = KVCacheManager(
            num_blocks,
            config.cache.block_size,
            config.cache.enable_prefix_caching,
            self._events,
            [KVCacheGroup(window) for window in self.executor.cache_windows],
            is_dense=config.has_dense_cache,
            states=None
            if num_kept is None
            else StateCache(config.scheduler.max_num_seqs, num_kept),
        )
        source, control = None, None
        if config.scheduler.max_draft_tokens:
            source, control = make_drafts(config.speculative)
        self._num_stages = config.parallel.pipeline_parallel_size
        self._num_pipelined_steps = config.parallel.num_pipelined_steps
        self.scheduler = Scheduler(
            config.scheduler,
            cache,
            source,
            control,
            num_stages=self._num_stages,
            num_pipelined_steps=self._num_pipelined_steps,
            media=_encoder_cache(
                config, self.executor.max_image_embeddings, self.executor.num_item_states
            ),
            step_bound=_step_bound(config),
        )
        self._transfer = self._make_transfer(cache)
        self._async_scheduling = async_scheduling or AsyncSchedulingPolicy(
            config.scheduler.async_scheduling and self.executor.is_asynchronous
        )
        self._named_processors = NamedProcessors(config.model.logits_processor_pattern)
        self._in_flight: deque[tuple[int, StepHandleLike]] = deque()
        self._resources = RequestResources(self.executor.release)
        self._sleeping_tags: list[str] = []
        self._warm_up = self._make_warm_up()
        # A string and not the exception, whose traceback references the engine and would keep it
        # alive.
        self._failure: str | None = None
        self._publish_events()

    def _make_warm_up(self) -> BackgroundWarmUp:
        """Create the object that runs the rest of the warm-up."""
        hpu, parallel = self.config.hpu, self.config.parallel
        # Engines of an external launcher must all do the same, but their clocks differ.
        is_alone = parallel.distributed_executor_backend != "external_launcher"
        is_loaded = hpu.serves_while_warming or hpu.adapt_buckets
        share = hpu.warm_up_share if is_loaded and is_alone else 0.0
        return BackgroundWarmUp(self.executor.warm_up_steps(), share, hpu.warm_up_max_delay)

    def _make_transfer(self, cache: KVCacheManager) -> KVTransfer | None:
        connector = self._connector
        if connector is None:
            return None
        if self.executor.cache_windows != (None,):
            self.executor.shutdown()
            self._close_connections()
            raise ConfigError(
                "kv_transfer_config is not supported for models with sliding-window layers. Leave "
                "it out"
            )
        return KVTransfer(connector, cache, self.executor)

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: a logits processor that the request names cannot be used.
            CapacityError: the request can never fit into the KV cache.
            EngineAsleepError: the engine sleeps.
            EngineDeadError: an earlier step failed.
        """
        self._check_alive()
        if self._sleeping_tags:
            raise EngineAsleepError(self._sleeping_tags)
        self.scheduler.check_request(request)
        if request.request_id in self._resources:
            raise RequestError(f"request {request.request_id!r} is already being processed")
        request = self._named_processors.resolve(request)
        future = self.executor.prepare(request)
        self._resources.hold(request)
        if self._transfer is not None:
            future = wait_all([future, self._transfer.prepare(request)])
        if future is None:
            self._queue(request)
        else:
            self._resources.await_load(request, future)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Abort requests, which then get no output; unknown ids are ignored."""
        ids = list(request_ids)
        if self._transfer is not None:
            self._transfer.abort(ids)
        self.scheduler.abort_requests(ids)
        self._resources.end(ids)
        self._publish_events()

    def has_unfinished_requests(self) -> bool:
        """Return whether the engine still has work: requests wait or run, blocks of finished
        requests are being written, or a step is in flight, even if all of its requests were
        aborted.
        """
        is_busy = self.scheduler.num_unfinished_requests > 0 or bool(self._in_flight)
        is_saving = self._transfer is not None and self._transfer.has_outputs
        return is_busy or bool(self._resources) or is_saving

    def step(self) -> EngineOutput:
        """Start a step, wait for the result of the oldest step in flight, and return it.

        When scheduling ahead, the next step is started before the wait; in a pipeline, as many
        steps are started as run at the same time. The output is empty if no request waits or runs.

        Raises:
            EngineDeadError: this step or an earlier one failed. The state of the workers is then
                unknown, so no more requests can be served.
        """
        self._check_alive()
        if self._resources:
            self._queue_prepared()
            if refused := self._resources.take_refused():
                return EngineOutput(finished=refused)
        if (saved := self._take_saved()) is not None:
            return saved
        if self._num_stages > 1:
            most = self._num_pipelined_steps
        else:
            most = 1 + self._async_scheduling.should_schedule_ahead
        if self._warm_up.is_due():
            most = 0 if self._in_flight else most
            self._run_warm_up()
        while len(self._in_flight) < most and self._start_step():
            pass
        if not self._in_flight:
            return self._take_saved(_PREPARE_WAIT_S) or _IDLE
        output = self._wait()
        trace = get_trace()
        with trace.span("update"):
            result = self.scheduler.update(output)
        self._resources.end(result.finished)
        if self._transfer is not None:
            result = self._transfer.end(result)
        self._publish_events()
        if trace.is_on:
            pool = self.scheduler.cache.pool
            used = pool.num_usable_blocks - pool.num_free
            trace.counter("cache", **cache_counters(used, pool.num_usable_blocks))
        return result

    def _take_saved(self, timeout_s: float = 0.0) -> EngineOutput | None:
        return None if self._transfer is None else self._transfer.take_output(timeout_s)

    def has_idle_work(self) -> bool:
        """Return whether `idle_step` has something to do: there are no requests, and measurements
        are not yet written or the warm-up is not complete.
        """
        is_idle = not (self.has_unfinished_requests() or self._sleeping_tags)
        has_work = not self._warm_up.is_done or self._has_measured
        return is_idle and has_work and self._failure is None

    def idle_step(self) -> None:
        """Write measurements, or run one forward pass of the remaining warm-up. A request that
        arrives meanwhile waits.

        Raises:
            EngineDeadError: it failed.
        """
        assert self.has_idle_work()
        try:
            if self._has_measured:
                self._save_measurements()
            elif not self._warm_up.is_done:
                self._warm_up.run_idle()
        except BaseException as failure:
            self._fail("work between requests", failure)

    def _run_warm_up(self) -> None:
        """Run the part of the warm-up that is due, unless a step is in flight."""
        if self._in_flight:
            return
        try:
            self._warm_up.run_due()
        except BaseException as failure:
            self._fail("a part of the warm-up", failure)
        self._async_scheduling.idle()  # the time until the next step was not spent on a step
        if (line := self._warm_up.cold_line()) is not None:
            logger.warning(line)

    def replace_buckets(self, buckets: Sequence[Sequence[int]]) -> bool:
        """Ask all workers to replace their buckets, and warm up the new ones in the background."""
        self._check_alive()
        has_begun = all(self.executor.call(Worker.replace_buckets, buckets))
        if has_begun:
            self._warm_up.resume()
        return has_begun

    def _save_measurements(self) -> None:
        self._has_measured = False
        for path in self.executor.call(Worker.save_measurements):
            logger.info("wrote the measured ranges to %s", path)

    def _queue(self, request: EngineRequest) -> None:
        self._has_measured = self._is_measuring
        if not self.scheduler.num_unfinished_requests:
            self._async_scheduling.idle()
            self._warm_up.note_idle()
        if self._transfer is not None:
            self._transfer.enter(request)
        self.scheduler.add_request(request)

    def _queue_prepared(self) -> None:
        """Queue the requests whose resources are loaded.

        If nothing else can run, wait for one of them, but only briefly, because the caller has to
        read its messages.
        """
        is_idle = not (self.scheduler.num_unfinished_requests or self._in_flight)
        for request in self._resources.take_loaded(_PREPARE_WAIT_S if is_idle else 0.0):
            self._queue(request)

    def _start_step(self) -> bool:
        """Start the next step, if a request can run. Returns whether one was started."""
        if not self.scheduler.may_schedule:
            return False
        trace = get_trace()
        transfer = self._transfer
        if transfer is not None:
            num_rows = self.config.scheduler.max_num_seqs - len(self.scheduler.running)
            transfer.load_next(islice(self.scheduler.waiting.in_order(), num_rows))
        with trace.span("schedule"):
            step = self.scheduler.schedule()
        if transfer is not None:
            transfer.save_freed()  # save blocks of requests that this step preempts
        if not len(step.rows):
            assert self._in_flight, "no waiting request can be scheduled"
            return False
        try:
            with trace.span("execute", step=step.step_id, rows=len(step.rows)):
                handle = self.executor.execute_model(step)
        except BaseException as failure:
            self._fail(f"step {step.step_id}", failure)
        self._in_flight.append((step.step_id, handle))
        return True

    def _wait(self) -> ModelRunnerOutput:
        """Wait for the result of the oldest step in flight."""
        step_id, handle = self._in_flight.popleft()
        self._async_scheduling.wait()
        try:
            with get_trace().span("wait", step=step_id):
                output = handle.result()
        except BaseException as failure:
            self._fail(f"step {step_id}", failure)
        self._async_scheduling.result()
        return output

    def _fail(self, what: str, failure: BaseException) -> NoReturn:
        """Stop the engine after a failure, because the state of the workers is unknown."""
        is_explained = isinstance(failure, VllmError)
        self._failure = str(failure) if is_explained else repr(failure)
        if not isinstance(failure, Exception):
            raise failure  # Ctrl-C is raised unchanged, because some programs catch every Exception
        logger.error(
            *("%s failed: %s; the engine stops", what, self._failure),
            exc_info=None if is_explained else failure,
        )
        raise EngineDeadError(f"{what} failed: {self._failure}") from failure

    @property
    def failure_fd(self) -> int | None:
        """File descriptor that becomes readable when a worker fails (`Executor.failure_fd`)."""
        return self.executor.failure_fd

    def check_health(self) -> None:
        """Stop the engine if a worker has failed while nothing ran.

        Raises:
            EngineDeadError: a worker has failed.
        """
        try:
            self.executor.check_health()
        except Exception as failure:
            self._fail("a worker", failure)

    def stats(self) -> SchedulerStats:
        """Return the numbers of requests, the use of the KV cache, and counters."""
        stats = self.scheduler.stats()
        num_waiting = stats.num_waiting + len(self._resources)
        running, waiting = self._resources.adapter_names(self.scheduler.running.adapters)
        return msgspec.structs.replace(
            stats,
            num_waiting=num_waiting,
            running_adapters=running,
            waiting_adapters=waiting,
            transfer=TransferStats() if self._transfer is None else self._transfer.stats,
            warm_up=self._warm_up.stats,
            runner=self.executor.stats(),
        )

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache and drop image embeddings, because the weights may have changed.
        Returns False and changes nothing while requests run.
        """
        is_done = self.scheduler.cache.forget_all()
        if is_done and self.scheduler.media is not None:
            self.scheduler.media.clear()
        if is_done and self._transfer is not None:
            self._transfer.reset()
        self._publish_events()
        return is_done

    def reset_mm_cache(self) -> bool:
        """Drop the image embeddings that no running request reads. The workers do so with the next
        step. Returns True.
        """
        if self.scheduler.media is not None:
            self.scheduler.media.clear()
        return True

    def is_sleeping(self) -> bool:
        """Return whether the memory of weights or KV cache is released."""
        return bool(self._sleeping_tags)

    def sleep(self, level: int = 1) -> None:
        """Let the workers release their memory. There must be no requests and no step in flight."""
        self._check_can_sleep()
        num_requests = self.scheduler.num_unfinished_requests + len(self._resources)
        if num_requests:
            raise CapacityError(
                f"the engine cannot sleep while requests run or wait (now {num_requests}): wait "
                "until they finish, or abort them, and call sleep again",
                status=409,
            )
        while self._in_flight:  # even if all requests of these steps have left
            self.scheduler.update(self._wait())
        is_reset = self.reset_prefix_cache()
        assert is_reset, "blocks are still held after the last request has left"
        started = time.perf_counter()
        self._change_sleep(Worker.sleep, level)
        logger.info("It took %.6f seconds to fall asleep.", time.perf_counter() - started)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Let the workers allocate their memory again, and update the set of parts that still
        sleep.
        """
        self._check_can_sleep()
        tags = None if tags is None else list(tags)
        woken, started = tags or self._sleeping_tags, time.perf_counter()
        self._change_sleep(Worker.wake_up, tags)
        seconds = time.perf_counter() - started
        logger.info("It took %.6f seconds to wake up tags %s.", seconds, woken)

    def _check_can_sleep(self) -> None:
        self._check_alive()
        if not self.config.model.enable_sleep_mode:
            raise RequestError(
                "sleep mode is off: start the engine with enable_sleep_mode=True "
                "(--enable-sleep-mode)"
            )

    def _change_sleep(
        self, method: Callable[[Worker, _Argument], None], argument: _Argument
    ) -> None:
        """Call all workers, then update the set of sleeping parts, even if the call failed."""
        try:
            self.executor.call(method, argument)
        finally:
            (self._sleeping_tags, *_) = self.executor.call(Worker.sleeping_tags)

    def collective_rpc(
        self,
        method: WorkerMethod,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker method for a user. The call may change the weights, so saving of KV blocks
        stops.
        """
        self._check_alive()
        refuse_engine_method(method)
        if self._transfer is not None:
            self._transfer.check_weights()
        return self.executor.collective_rpc(method, timeout, args, kwargs)

    def call_workers(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call a worker method for the engine itself."""
        self._check_alive()
        return self.executor.collective_rpc(method, None, args, kwargs)

    def shutdown(self) -> None:
        """Write pending measurements, shut down the workers and close the trace. A second call does
        nothing.
        """
        self._in_flight.clear()
        if self._has_measured and self._failure is None:
            self._save_measurements()
        if self._transfer is not None:
            self._transfer.close()
        self.executor.shutdown()
        self._close_publisher()
        get_trace().close()

    def _publish_events(self) -> None:
        """Publish the changes of the prefix cache since the last call."""
        if self._publisher is None or self._events is None:
            return
        if events := self._events.drain():
            self._publisher.publish(events)

    def _close_connections(self) -> None:
        """Close the connector and the event publisher after a failed start."""
        if self._connector is not None:
            self._connector.close()
        self._close_publisher()

    def _close_publisher(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(f"the engine has stopped: {self._failure}")


def _encoder_cache(
    config: VllmConfig, largest: int | None, num_states: int | None
) -> EncoderCache | None:
    """Create the accounting of image embeddings; None if the model reads only text.

    Args:
        config: config of the engine.
        largest: embeddings of the largest image for which the workers have memory; None: no limit.
        num_states: hidden states for cross-attention that the workers can store; None: the model
            has no cross-attention.
    """
    arch = config.model.arch
    if arch is None or arch.media_config is None:
        return None
    limits = config.scheduler
    wants_whole = config.multimodal.disable_chunked_mm_input or arch.media_sees_ahead
    is_whole = wants_whole and limits.enable_chunked_prefill
    return EncoderCache(
        limits.encoder_cache_size if num_states is None else num_states,
        limits.encoder_budget,
        most_whole=limits.longest_chunk if is_whole else None,
        largest=largest,
    )


def _step_bound(config: VllmConfig) -> StepBound | None:
    max_ms = config.scheduler.max_step_ms
    return StepBound(max_ms / 1e3, config.parallel.num_pipelined_steps) if max_ms else None


def _make_connector(config: VllmConfig) -> KVConnector | None:
    transfer = config.connector.kv_transfer
    return None if transfer is None else make_connector(transfer)
