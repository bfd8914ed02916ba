"""Ranks as threads of one process, which exchange tensors through shared memory as processes do."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed import Meeting
from vllm.executor import Executor, StepHandleLike, WorkerMethod
from vllm.executor.worker_call import call_worker, make_worker
from vllm.messages import SchedulerOutput


class ThreadRanks(Executor):
    """Runs every step on all ranks, each in a thread of its own; all have the same tokens."""

    def __init__(self, config: VllmConfig) -> None:
        self._meeting = Meeting.create(config.parallel)
        self._config = config
        self.workers: list[Any] = []

    def start_workers(self) -> None:
        parallel = self._config.parallel
        ranks = range(parallel.world_size)
        self.workers = [make_worker(self._config, rank) for rank in ranks]
        self._threads = [ThreadPoolExecutor(1) for _ in ranks]
        for rank, worker in enumerate(self.workers):
            worker.load(rank)
        meetings = [Meeting.of(parallel, rank, *self._meeting.descriptors) for rank in ranks]
        self._on_all(lambda worker: worker.join(meetings[worker.rank]))

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        return self._on_all(lambda worker: getattr(worker, method)(*args))

    def _on_all(self, call: Callable[[Any], Any]) -> list[Any]:
        calls = zip(self._threads, self.workers, strict=True)
        futures = [thread.submit(call, worker) for thread, worker in calls]
        return [future.result() for future in futures]

    def execute_model(self, step: SchedulerOutput) -> StepHandleLike:
        handles = self.call_workers("execute_model", step)
        results = [handle.result() for handle in handles]
        assert len({tuple(result.token_ids) for result in results}) == 1, "ranks differ"
        handle: StepHandleLike = handles[0]
        return handle

    def collective_rpc(
        self,
        method: WorkerMethod,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        return [call_worker(worker, method, args, kwargs or {}) for worker in self.workers]

    def shutdown(self) -> None:
        if not self.workers:
            return
        self.workers.clear()
        for thread in self._threads:
            thread.shutdown()
        self._meeting.close()
