"""The loop: schedule, execute, update. Knows no text, no HTTP, no device."""

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import msgspec

from vllm.config import VllmConfig
from vllm.core.cache_events import CacheEventLog
from vllm.core.kv_cache_manager import KVCacheManager
from vllm.core.scheduler import Scheduler
from vllm.engine.kv_event_publisher import KVEventPublisher
from vllm.engine.named_processors import NamedProcessors
from vllm.engine.run_ahead import RunAhead
from vllm.errors import EngineDeadError
from vllm.executor import Executor, StepHandleLike, UniProcExecutor
from vllm.logger import init_logger
from vllm.messages import EngineOutput, EngineRequest, ModelRunnerOutput, SchedulerStats
from vllm.utils.trace import cache_counters, get_trace, open_trace, set_trace

logger = init_logger(__name__)

_IDLE = EngineOutput()


class EngineCore:
    """A scheduler and the workers it drives.

    Args:
        config: complete and consistent.
        executor: loaded workers; None makes those that `config` names.
        run_ahead: whether to schedule ahead; None: as `config` says, where the executor can and
            it pays.
    """

    def __init__(
        self,
        config: VllmConfig,
        executor: Executor | None = None,
        run_ahead: RunAhead | None = None,
    ) -> None:
        started = time.perf_counter()
        self.config = config
        if config.observability.profiler_enabled:
            set_trace(open_trace(Path.cwd()))
        self._publisher: KVEventPublisher | None = None
        self._events: CacheEventLog | None = None
        if config.observability.kv_events.is_published:
            # First of all: whether its addresses are free is known before a model is loaded.
            self._publisher = KVEventPublisher(config.observability.kv_events)
            self._events = CacheEventLog(config.cache.block_size)
        try:
            self.executor = UniProcExecutor(config) if executor is None else executor
            num_blocks = self.executor.initialize_cache()
        except BaseException:
            self._close_publisher()
            raise
        cache = KVCacheManager(
            num_blocks, config.cache.block_size, config.cache.enable_prefix_caching, self._events
        )
        self.scheduler = Scheduler(config.scheduler, cache)
        self._run_ahead = run_ahead or RunAhead(
            config.scheduler.async_scheduling and self.executor.is_asynchronous
        )
        self._named_processors = NamedProcessors(config.model.logits_processor_pattern)
        self._in_flight: deque[tuple[int, StepHandleLike]] = deque()
        # Not the exception: its traceback holds the engine, which then nobody could collect.
        self._failure: str | None = None
        logger.info(
            "ready in %.1f s: %s, max_model_len %d, at most %d requests and %d tokens per step",
            time.perf_counter() - started,
            (config.model.served_model_name or (config.model.model,))[0],
            config.scheduler.max_model_len,
            config.scheduler.max_num_seqs,
            config.scheduler.max_num_batched_tokens,
        )

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: a logits processor that it names cannot be used.
            CapacityError: it can never fit the KV cache.
            EngineDeadError: an earlier step failed.
        """
        self._check_alive()
        request = self._named_processors.resolve(request)
        if not self.scheduler.num_unfinished_requests:
            self._run_ahead.idle()
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Forget requests; ids that are not there are passed over, and nothing is reported."""
        self.scheduler.abort_requests(request_ids)
        self._publish_events()

    def has_unfinished_requests(self) -> bool:
        """Something waits or runs, or a step is in flight whose requests have all left."""
        return self.scheduler.num_unfinished_requests > 0 or bool(self._in_flight)

    def step(self) -> EngineOutput:
        """The result of the oldest step, after starting those that can run.

        One step is started and waited for; running ahead, the next one is started before the
        wait. Empty when nothing waits or runs.

        Raises:
            EngineDeadError: this step or an earlier one failed. The state of the workers is not
                known then, so nothing can be served any more.
        """
        self._check_alive()
        if not self._in_flight:
            self._start_step()
        if self._in_flight and self._run_ahead.pays:
            self._start_step()
        if not self._in_flight:
            return _IDLE
        output = self._wait()
        trace = get_trace()
        with trace.span("update"):
            result = self.scheduler.update(output)
        self._publish_events()
        if trace.is_on:
            pool = self.scheduler.cache.pool
            used = pool.num_usable_blocks - pool.num_free
            trace.counter("cache", **cache_counters(used, pool.num_usable_blocks))
        return result

    def _start_step(self) -> None:
        """Start the next step, if there is something that can run."""
        if not self.scheduler.num_unfinished_requests:
            return
        trace = get_trace()
        with trace.span("schedule"):
            step = self.scheduler.schedule()
        if not len(step.rows):
            assert self._in_flight, "requests wait, none is in flight, and none can be scheduled"
            return
        try:
            with trace.span("execute", step=step.step_id, rows=len(step.rows)):
                handle = self.executor.execute_model(step)
        except BaseException as failure:
            self._fail(step.step_id, failure)
        self._in_flight.append((step.step_id, handle))

    def _wait(self) -> ModelRunnerOutput:
        """The result of the oldest step in flight."""
        step_id, handle = self._in_flight.popleft()
        self._run_ahead.wait()
        try:
            with get_trace().span("wait", step=step_id):
                output = handle.result()
        except BaseException as failure:
            self._fail(step_id, failure)
        self._run_ahead.result()
        return output

    def _fail(self, step_id: int, failure: BaseException) -> NoReturn:
        """The state of the workers is not known any more."""
        self._failure = repr(failure)
        if not isinstance(failure, Exception):
            raise failure  # Ctrl-C stays what it is, for programs that catch every Exception
        logger.error("step %d failed; the engine stops", step_id, exc_info=failure)
        raise EngineDeadError(f"step {step_id} failed: {self._failure}") from failure

    def preload(self) -> bool:
        """Load in the background what only some requests need; always True."""
        self.executor.preload()
        return True

    def stats(self) -> SchedulerStats:
        """How full it is, and what it has done."""
        return msgspec.structs.replace(self.scheduler.stats(), runner=self.executor.stats())

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and no change, while requests run."""
        is_done = self.scheduler.cache.pool.forget_all()
        self._publish_events()
        return is_done

    def shutdown(self) -> None:
        """Let the workers go and end the trace. Calling it again does nothing."""
        self._in_flight.clear()
        self.executor.shutdown()
        self._close_publisher()
        get_trace().close()

    def _publish_events(self) -> None:
        """Tell what has become of the prefix cache since the last time."""
        if self._publisher is None or self._events is None:
            return
        if events := self._events.take():
            self._publisher.publish(events)

    def _close_publisher(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(f"the engine has stopped: {self._failure}")
