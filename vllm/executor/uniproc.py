"""Run one worker in the engine's own process."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from vllm.config import VllmConfig
from vllm.executor.base import Executor
from vllm.executor.ranks.worker_call import WorkerCall, make_worker
from vllm.executor.step_thread import StepThread, has_core_to_spare
from vllm.messages import EngineRequest, RunnerStats, SchedulerOutput, StepTokens
from vllm.platforms import resolve_platform
from vllm.utils.futures import join_nested
from vllm.worker.interface import StepHandleLike, Worker

_Result = TypeVar("_Result")


class UniProcExecutor(Executor):
    """Runs one worker in this process, which is called directly or, if that is faster, in a step
    thread.

    Args:
        config: config of the engine.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._worker: Worker | None = None
        self._thread: StepThread | None = None
        self._releases: dict[str, Future[None]] = {}
        """Request id -> its last release, which may still wait for a step."""

    def start_workers(self) -> None:
        """Create the worker and load the model.

        Raises:
            ConfigError: a class that `config.parallel` names cannot be used.
        """
        self._load_worker()

    def _load_worker(self) -> None:
        """Load rank 0 in this process."""
        config = self._config
        worker = make_worker(config, 0)
        worker.load(0)
        self._worker = worker
        platform = resolve_platform(config.device.device)
        wants_thread = config.scheduler.async_scheduling and not platform.is_asynchronous
        if wants_thread and self._has_core_to_spare():
            self._thread = StepThread(worker)
        self.is_asynchronous = platform.is_asynchronous or self._thread is not None

    def _has_core_to_spare(self) -> bool:
        return has_core_to_spare()

    def call_workers(self, method: Callable[..., _Result], *args: Any) -> list[_Result]:
        """Call a method of the worker."""
        return [getattr(self._running_worker, method.__name__)(*args)]

    def execute_model(self, step: SchedulerOutput) -> StepHandleLike:
        """Start a step."""
        worker = self._running_worker
        return (worker if self._thread is None else self._thread).execute_model(step)

    def _record_tokens(self, tokens: StepTokens) -> None:
        """Record the tokens that another rank sampled, after the steps that were started before."""
        worker = self._running_worker
        if self._thread is None:
            worker.record_tokens(tokens)
        else:
            self._thread.post(
                "recording the tokens of another rank", lambda: worker.record_tokens(tokens)
            )

    def prepare(self, request: EngineRequest) -> Future[str | None] | None:
        """Load what a request needs, in the background."""
        worker, last = self._running_worker, self._releases.get(request.request_id)
        if self._thread is None or last is None or last.done():
            return worker.prepare(request)
        # The id is used again, and the release that still waits would take from the new request
        # what is loaded for it now.
        return join_nested(self._thread.call(lambda: worker.prepare(request)))

    def release(self, request_ids: Sequence[str]) -> None:
        """Release what the worker holds for finished requests, after the steps that were started
        before.
        """
        worker = self._running_worker
        if self._thread is None:
            worker.release(request_ids)
            return
        last = self._thread.post("releasing finished requests", lambda: worker.release(request_ids))
        waiting = {name: each for name, each in self._releases.items() if not each.done()}
        self._releases = waiting | dict.fromkeys(request_ids, last)

    def run_call(self, call: WorkerCall) -> list[Any]:
        """Call a method of the worker. The timeout only has an effect if steps run in their own
        thread.
        """
        worker = self._running_worker
        if self._thread is None:
            return [call.on(worker)]
        # Run in the thread of the steps: a profiler, for example, only sees the thread that started
        # it.
        return [self._thread.call(lambda: call.on(worker)).result(call.timeout)]

    def stats(self) -> RunnerStats:
        """Return the counters of the worker."""
        return self._running_worker.stats()

    def shutdown(self) -> None:
        """Wait for the running step, then drop the model and its caches."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._worker = None

    @property
    def _running_worker(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("the executor has not started, or has been shut down")
        return self._worker
