"""Ranks as threads of one process, which exchange tensors through shared memory like processes."""

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed import RankLayout, Rendezvous
from vllm.executor import Executor, StepHandleLike
from vllm.executor.ranks.worker_call import WorkerCall, make_worker
from vllm.messages import EngineRequest, ModelRunnerOutput, SchedulerOutput, StepTokens
from vllm.utils.futures import wait_all


class ThreadRanks(Executor):
    """Runs every step on all ranks, each in a separate thread.

    All ranks that sample have the same tokens. The pipeline stages that do not sample get the
    tokens.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._rendezvous = Rendezvous.create(config.parallel)
        weakref.finalize(
            self, self._rendezvous.close
        )  # closes the rendezvous even if the start fails
        self._config = config
        self.workers: list[Any] = []
        self._threads: list[ThreadPoolExecutor] = []
        self._others: list[Rendezvous] = []
        self.most_in_flight = self._num_in_flight = self.most_rows = 0

    def start_workers(self) -> None:
        parallel = self._config.parallel
        ranks = range(parallel.world_size)
        self.workers = [make_worker(self._config, rank) for rank in ranks]
        self._threads = [ThreadPoolExecutor(1) for _ in ranks]
        for rank, worker in enumerate(self.workers):
            worker.load(rank)
        first = self._rendezvous
        shared = first.arena_fd, first.address[1]
        self._others = [first, *(Rendezvous.of(parallel, rank, *shared) for rank in ranks[1:])]
        self._on_all(lambda worker: worker.join(self._others[worker.rank]))

    def call_workers(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return self._on_all(lambda worker: getattr(worker, method.__name__)(*args))

    def _on_all(self, call: Callable[[Any], Any]) -> list[Any]:
        return [future.result() for future in self._start_on_all(call)]

    def _start_on_all(self, call: Callable[[Any], Any]) -> "list[Future[Any]]":
        calls = zip(self._threads, self.workers, strict=True)
        return [thread.submit(call, worker) for thread, worker in calls]

    def execute_model(self, step: SchedulerOutput) -> StepHandleLike:
        steps = self._start_on_all(lambda worker: worker.execute_model(step).result())
        self.most_in_flight = max(self.most_in_flight, 1 + self._num_in_flight)
        self._num_in_flight += 1
        self.most_rows = max(self.most_rows, len(step.rows))
        return _Step(self, steps)

    def prepare(self, request: EngineRequest) -> "Future[str | None] | None":
        return wait_all([worker.prepare(request) for worker in self.workers])

    def release(self, request_ids: Sequence[str]) -> None:
        self._on_all(lambda worker: worker.release(request_ids))

    def finish_step(self, steps: "list[Future[Any]]") -> ModelRunnerOutput:
        self._num_in_flight -= 1
        results = [step.result() for step in steps]
        first = RankLayout.of(self._config.parallel).result_rank
        assert len({tuple(result.token_ids) for result in results[first:]}) == 1, "ranks differ"
        output: ModelRunnerOutput = results[first]
        assert not any(len(result.rows) for result in results[:first]), "it does not sample"
        if len(output.rows):
            for thread, worker in zip(self._threads[:first], self.workers[:first], strict=True):
                thread.submit(worker.record_tokens, StepTokens.of(output)).result()
        return output

    def run_call(self, call: WorkerCall) -> list[Any]:
        return [call.on(worker) for worker in self.workers]

    def shutdown(self) -> None:
        if not self.workers:
            return
        self.workers.clear()
        for thread in self._threads:
            thread.shutdown()
        for rendezvous in self._others:
            rendezvous.leave()
        self._rendezvous.close()


class _Step:
    def __init__(self, ranks: ThreadRanks, steps: "list[Future[Any]]") -> None:
        self._ranks = ranks
        self._steps = steps

    def result(self) -> ModelRunnerOutput:
        return self._ranks.finish_step(self._steps)
