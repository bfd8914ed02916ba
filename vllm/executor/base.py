"""The interface of executors, which run the workers, and the start sequence of workers.

An executor says how its workers are called (`start_workers`, `call_workers`). The sequence in which
they start, and what they have to agree on, is the same for all executors and stands here.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from vllm.executor.ranks.worker_call import WorkerMethod
from vllm.messages import EngineRequest, RunnerStats, SchedulerOutput
from vllm.utils.clean_up import on_failure
from vllm.utils.process import startup_progress
from vllm.worker.interface import StepHandleLike, WarmUpStep, Worker

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class Executor(ABC):
    """Workers, wherever they live.

    Attributes:
        is_asynchronous: `execute_model` returns before the step is computed, so that another one
            can be scheduled meanwhile. Known once the workers are loaded.
        cache_windows: of the groups of layers that have block tables of their own; None: full
            attention. Known once caches are allocated.
        num_item_states: hidden states that all workers can keep for cross-attention; None: the
            model has none. Known once caches are allocated.
        max_image_embeddings: of the largest image that all workers have memory for; None: of any.
            Known once caches are allocated.
    """

    is_asynchronous: bool = False
    cache_windows: tuple[int | None, ...] = (None,)
    num_kept_states: int | None = None
    num_item_states: int | None = None
    max_image_embeddings: int | None = None

    # ---- the start ------------------------------------------------------------------------

    def start(self) -> int:
        """Load, measure, allocate and warm up all workers.

        Returns:
            The number of KV blocks that all of them have, the null block included.

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
        """Start the processes of the workers, which then load what they need while the caller does
        other things. `start` does it otherwise. It takes much longer in a process of several
        threads, so a program calls it before it makes any."""
        return None

    @abstractmethod
    def start_workers(self) -> None:
        """Make the workers, and let each of them `load` its part of the model."""

    @abstractmethod
    def call_workers(self, method: Callable[..., _Result], *args: Any) -> list[_Result]:
        """Call a method on every worker during the start, when no step is in flight. A failure is
        the end of the executor.

        Args:
            method: of `Worker`, such as `Worker.measure`.
            args: of the call, without what each rank has itself: its number, its meeting.

        Returns:
            The results by rank.
        """

    def allocate(self) -> int:
        """Allocate KV caches on all workers. Returns the number of blocks, the largest that fits on
        every rank."""
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
        """Warm all workers up: one launch on all of them each time that the iterator is advanced.

        The first iterator is part of the start; another one runs what the start has left. See
        `WarmUpSteps`.

        Yields:
            Each step, with what was decided.
        """
        steps = self.warm_up_steps()
        while steps.name() is not None:
            yield steps.run()

    def warm_up_steps(self) -> "WarmUpSteps":
        """Return what names and runs the steps of a warm-up."""
        return WarmUpSteps(self)

    # ---- steps ----------------------------------------------------------------------------

    @abstractmethod
    def execute_model(self, step: SchedulerOutput) -> StepHandleLike:
        """Start a step on all workers; at most one other is in flight."""

    def prepare(self, request: EngineRequest) -> "Future[str | None] | None":
        """Load in the background what a request needs, so that no step waits for it. Another
        request may have had its id before and be released, even if its last step still runs.

        Returns:
            A future that is done when all workers have loaded it or have failed. Its result is the
            reason why the request cannot run, or None. No future (None): nothing has to be loaded.
        """
        return None

    def release(self, request_ids: Sequence[str]) -> None:
        """Release what the workers hold for finished requests with an adapter, after the steps that
        have been started."""
        return None

    def call(
        self,
        method: Callable[Concatenate[Worker, _Args], _Result],
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> list[_Result]:
        """Call a method of every worker, after the steps that have been started. The workers
        continue if it raises.

        Args:
            method: of `Worker`, such as `Worker.wake_up`.
            args, kwargs: of the call.

        Returns:
            One result per worker.
        """
        return self.collective_rpc(method.__name__, None, args, kwargs)

    @abstractmethod
    def collective_rpc(
        self,
        method: WorkerMethod,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker, after the steps that have been started.

        Args:
            method: its name, or a function whose first argument is the worker.
            timeout: seconds to wait; None waits without limit. The call itself is not ended.
            args, kwargs: of the call.

        Returns:
            One result per worker.

        Raises:
            RequestError: the workers have no such method.
            TimeoutError: the call took longer than `timeout`.
        """

    def stats(self) -> RunnerStats:
        """Return counters of the workers since the start; all 0 if they do not count.

        Every worker runs every step, so the one that counts stands for all of them.
        """
        return RunnerStats()

    @property
    def failure_fd(self) -> int | None:
        """A file descriptor that is readable once a worker has failed, for loops that wait for
        something to do; None: no worker can fail without a call."""
        return None

    def check_health(self) -> None:
        """Raise the failure of a worker, if one has failed since the last call of it."""
        return None

    @abstractmethod
    def shutdown(self) -> None:
        """Shut down all workers that run, also after a failed start, or before any start. Calling
        it again does nothing."""


class WarmUpSteps:
    """Names the launches of a warm-up, and runs them on all workers.

    A launch that one rank has no memory for is given up on all ranks. All of them are told how
    long each launch has taken, so that they expect the same of the next ones.

    Args:
        executor: whose workers warm up. No step is in flight in a call of this.
        clock: in seconds.
    """

    def __init__(self, executor: Executor, clock: Callable[[], float] = time.monotonic) -> None:
        self._executor = executor
        self._clock = clock
        self._named: WarmUpStep | None = None
        self._given_up: str | None = None
        self._seconds: float | None = None

    def name(self, longest_s: float | None = None) -> WarmUpStep | None:
        """Name the next step; None: there is none left.

        Args:
            longest_s: that it may take, as far as is known; None: any time.
        """
        given = (self._given_up, self._seconds, longest_s)
        found = self._executor.call_workers(Worker.next_warm_up, *given)
        self._given_up = self._seconds = None
        steps = [step for step in found if step is not None]
        places = {(step.phase, step.name, step.index, step.total) for step in steps}
        assert len(steps) in (0, len(found)) and len(places) <= 1, f"ranks differ: {found}"
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
        """Run the step that was named. Returns it with what was decided."""
        step = self._named
        assert step is not None and not step.must_wait, "no step has been named"
        given_up = step.given_up
        if given_up is None:
            startup_progress.report(step.phase, step.index - 1, step.total, step.eta_seconds)
            began = self._clock()
            given_up = _first_reason(self._executor.call_workers(Worker.warm_up))
            self._seconds = self._clock() - began
        self._given_up = given_up
        return msgspec.structs.replace(step, given_up=given_up)


def _first_reason(reasons: Sequence[str | None]) -> str | None:
    """Return the first reason of a rank to give up a launch; name the rank if there are several."""
    for rank, reason in enumerate(reasons):
        if reason is not None:
            return reason if len(reasons) == 1 else f"{reason} (rank {rank})"
    return None
