"""Define the interface of executors, which run the workers, and the start sequence of workers.

An executor implements how its workers are called (`start_workers`, `call_workers`). The sequence in
which they start, and the values on which they have to agree, are the same for all executors and are
implemented here.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from vllm.executor.ranks.worker_call import WorkerCall, WorkerMethod
from vllm.messages import EngineRequest, RunnerStats, SchedulerOutput
from vllm.utils.clean_up import on_failure
from vllm.utils.process import startup_progress
from vllm.worker.interface import StepHandleLike, WarmUpStep, WarmUpUpdate, Worker

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class Executor(ABC):
    """Runs the workers of an engine, in any process or on any machine.

    Attributes:
        is_asynchronous: `execute_model` returns before the step is computed, so that another step
            can be scheduled meanwhile. Known after the workers are loaded.
        cache_windows: windows of the groups of layers with separate block tables; None: full
            attention. Known after the caches are allocated.
        num_item_states: hidden states for cross-attention that all workers can store; None: the
            model has no cross-attention. Known after the caches are allocated.
        max_image_embeddings: embeddings of the largest image for which all workers have memory;
            None: no limit. Known after the caches are allocated.
    """

    is_asynchronous: bool = False
    cache_windows: tuple[int | None, ...] = (None,)
    num_kept_states: int | None = None
    num_item_states: int | None = None
    max_image_embeddings: int | None = None

    # ---- the start ------------------------------------------------------------------------

    def start(self) -> int:
        """Load the model on all workers, measure their memory, allocate caches and warm up.

        Returns:
            The number of KV blocks on every worker, the null block included.

        Raises:
            ConfigError: the model cannot be loaded, or some worker has too little memory.
        """
        with on_failure(self.shutdown):
            self.start_workers()
            num_blocks = self.allocate()
            for _ in self.warm_up():
                pass
        return num_blocks

    def begin(self) -> None:
        """Start the processes of the workers early, so that they load while the caller does other
        things.

        Optional: `start` also does it. Starting takes much longer in a process with several
        threads, so call this before any thread is started.
        """
        return None

    @abstractmethod
    def start_workers(self) -> None:
        """Create the workers, and let each of them `load` its part of the model."""

    @abstractmethod
    def call_workers(self, method: Callable[..., _Result], *args: Any) -> list[_Result]:
        """Call a method of every worker during the start, while no step is in flight. After a
        failure the executor cannot be used.

        Args:
            method: method of `Worker`, such as `Worker.measure`.
            args: arguments of the call; each rank adds its own rank and rendezvous.

        Returns:
            The results by rank.
        """

    def allocate(self) -> int:
        """Allocate the KV caches on all workers.

        Returns:
            The number of blocks: the largest number that fits on every rank.
        """
        reports = self.call_workers(Worker.measure)
        num_blocks = min(report.num_blocks for report in reports)
        self.cache_windows = reports[0].windows
        assert {report.windows for report in reports} == {self.cache_windows}, "ranks differ"
        counts = [r.num_kept_states for r in reports if r.num_kept_states is not None]
        self.num_kept_states = min(counts) if counts else None
        states = [r.num_item_states for r in reports if r.num_item_states is not None]
        self.num_item_states = min(states) if states else None
        limits = [r.max_image_embeddings for r in reports if r.max_image_embeddings is not None]
        self.max_image_embeddings = min(limits) if limits else None
        self.call_workers(Worker.allocate, num_blocks)
        return num_blocks

    def warm_up(self) -> Iterator[WarmUpStep]:
        """Warm up all workers. Each step of the iterator runs one forward pass on all of them.

        The first iterator is part of the start. Another one runs what the start left out
        (`WarmUpSteps`).

        Yields:
            Each finished step, with the decision about it.
        """
        steps = self.warm_up_steps()
        while steps.name() is not None:
            yield steps.run()

    def warm_up_steps(self) -> "WarmUpSteps":
        """Return an object that names and runs the steps of a warm-up."""
        return WarmUpSteps(self)

    # ---- steps ----------------------------------------------------------------------------

    @abstractmethod
    def execute_model(self, step: SchedulerOutput) -> StepHandleLike:
        """Start a step on all workers. At most one other step may be in flight."""

    def prepare(self, request: EngineRequest) -> "Future[str | None] | None":
        """Load in the background what a request needs, so that no step waits for it.

        An earlier request may have used the same id and been released, even if its last step still
        runs.

        Returns:
            A future that is done when all workers have loaded it or have failed. Its result is the
            reason why the request cannot run, or None. None instead of a future: nothing has to be
            loaded.
        """
        return None

    def release(self, request_ids: Sequence[str]) -> None:
        """Release what the workers hold for finished requests, after the steps that were started
        before.
        """
        return None

    def call(
        self,
        method: Callable[Concatenate[Worker, _Args], _Result],
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> list[_Result]:
        """Call a method of every worker, after the steps that were started before. The workers
        continue to work if it raises.

        Args:
            method: method of `Worker`, such as `Worker.wake_up`.
            args, kwargs: arguments of the call.

        Returns:
            One result per worker.
        """
        return self.collective_rpc(method.__name__, None, args, kwargs)

    def collective_rpc(
        self,
        method: WorkerMethod,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker by name, after the steps that were started before.

        Args:
            method: name of the method, or a function whose first argument is the worker.
            timeout: seconds to wait; None: no limit. The call itself is not aborted.
            args, kwargs: arguments of the call.

        Returns:
            One result per worker.

        Raises:
            RequestError: the workers have no such method.
            TimeoutError: the call took longer than `timeout`.
        """
        return self.run_call(WorkerCall(method, timeout, args, kwargs or {}))

    @abstractmethod
    def run_call(self, call: WorkerCall) -> list[Any]:
        """Run a call of `collective_rpc`."""

    def stats(self) -> RunnerStats:
        """Return counters of the workers since the start; all 0 if the workers do not count.

        Every worker runs every step, so the counters of one worker represent all.
        """
        return RunnerStats()

    @property
    def failure_fd(self) -> int | None:
        """File descriptor that becomes readable when a worker fails, for event loops. None: a
        worker can fail only in a call.
        """
        return None

    def check_health(self) -> None:
        """Raise the error of a worker that has failed since its last call."""
        return None

    @abstractmethod
    def shutdown(self) -> None:
        """Shut down all running workers, also after a failed start or before any start. A second
        call does nothing.
        """


class WarmUpSteps:
    """Names the forward passes of a warm-up, and runs them on all workers.

    If one rank lacks memory for a forward pass, all ranks skip it. All ranks are told how long each
    one took, so that they estimate the same time for the next ones.

    Args:
        executor: executor of the workers. No step may be in flight during calls.
        clock: returns seconds.
    """

    def __init__(self, executor: Executor, clock: Callable[[], float] = time.monotonic) -> None:
        self._executor = executor
        self._clock = clock
        self._named: WarmUpStep | None = None
        self._last = WarmUpUpdate()
        """Result of the last step."""

    def name(self, longest_s: float | None = None) -> WarmUpStep | None:
        """Return the next step without running it; None if no step is left.

        Args:
            longest_s: longest time that it may take, as far as is known; None: no limit.
        """
        update = msgspec.structs.replace(self._last, longest_s=longest_s)
        found = self._executor.call_workers(Worker.next_warm_up, update)
        self._last = WarmUpUpdate()
        steps = [step for step in found if step is not None]
        steps_of_ranks = {(step.phase, step.name, step.index, step.total) for step in steps}
        assert len(steps) in (0, len(found)) and len(steps_of_ranks) <= 1, f"ranks differ: {found}"
        if steps:
            refusal = _first_reason([each.given_up for each in steps])
            self._named = msgspec.structs.replace(steps[0], given_up=refusal)
            return self._named
        if self._named is not None:
            step = self._named
            startup_progress.report(step.phase, step.total, step.total, 0.0)
        self._named = None
        return None

    def run(self) -> WarmUpStep:
        """Run the step that `name` returned. Returns it with the decision about it."""
        step = self._named
        assert step is not None and not step.must_wait, "no step has been named"
        given_up, seconds = step.given_up, None
        if given_up is None:
            startup_progress.report(step.phase, step.index - 1, step.total, step.eta_seconds)
            began = self._clock()
            given_up = _first_reason(self._executor.call_workers(Worker.warm_up))
            seconds = self._clock() - began
        self._last = WarmUpUpdate(given_up=given_up, seconds=seconds)
        return msgspec.structs.replace(step, given_up=given_up)


def _first_reason(reasons: Sequence[str | None]) -> str | None:
    """Return the first reason of a rank to skip a forward pass, with the rank if there are
    several.
    """
    for rank, reason in enumerate(reasons):
        if reason is not None:
            return reason if len(reasons) == 1 else f"{reason} (rank {rank})"
    return None
