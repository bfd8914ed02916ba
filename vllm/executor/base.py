"""What the engine core asks of whoever runs the workers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from vllm.executor.worker_call import WorkerMethod
from vllm.messages import EngineRequest, RunnerStats, SchedulerOutput
from vllm.worker.interface import StepHandleLike


class Executor(ABC):
    """Workers, wherever they live.

    Attributes:
        is_asynchronous: `execute_model` returns before the step is computed, so that another one
            can be scheduled meanwhile.
    """

    is_asynchronous: bool = False

    @abstractmethod
    def initialize_cache(self) -> int:
        """Allocate KV caches on all workers; the number of blocks they all have."""

    @abstractmethod
    def execute_model(self, step: SchedulerOutput) -> StepHandleLike:
        """Start a step on all workers; at most one other is in flight."""

    def prepare(self, request: EngineRequest) -> "Future[None] | None":
        """Load in the background what the steps of a request need, so that none waits for it.

        Returns:
            Done when it is loaded, also when that failed: then the request fails in its first
            step. None: nothing has to be loaded.
        """
        return None

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
        """What the workers have done since they started; nothing where they do not count.

        Every worker runs every step, so the one that counts stands for all of them.
        """
        return RunnerStats()

    @abstractmethod
    def shutdown(self) -> None:
        """Let the workers go. Calling it again does nothing."""
