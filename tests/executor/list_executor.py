"""An executor over several workers in this process, which are called one after another."""

from collections.abc import Callable, Sequence
from typing import Any

from vllm.executor import Executor, StepHandleLike, Worker
from vllm.executor.ranks.worker_call import WorkerCall
from vllm.messages import SchedulerOutput


class ListExecutor(Executor):
    """Runs every step on all workers, and returns the result of the first.

    Args:
        workers: workers in the order of their ranks.
    """

    def __init__(self, workers: Sequence[Any]) -> None:
        self.workers = list(workers)

    def start_workers(self) -> None:
        for rank, worker in enumerate(self.workers):
            worker.load(rank)

    def call_workers(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return [getattr(worker, method.__name__)(*args) for worker in self.workers]

    def execute_model(self, step: SchedulerOutput) -> StepHandleLike:
        return self.call_workers(Worker.execute_model, step)[0]

    def run_call(self, call: WorkerCall) -> list[Any]:
        return [call.on(worker) for worker in self.workers]

    def shutdown(self) -> None:
        self.workers.clear()
