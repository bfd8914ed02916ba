"""Run several workers on one machine: rank 0 in the engine's process, each other rank in its own
process.

A step is sent to all ranks in one message. Each of them computes it and samples. The random numbers
of a request depend only on its seed and the position, so all ranks get the same tokens and need not
exchange them. The result of rank 0 is used.

In a pipeline only the ranks of the last stage sample. The first of them sends the result to the
engine, which sends the tokens to the other stages before it starts the next step of these requests.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from time import monotonic
from typing import Any, TypeVar

from vllm.config import VllmConfig
from vllm.distributed import RankLayout, Rendezvous
from vllm.errors import CollectiveError, ConfigError, RequestError
from vllm.executor.ranks.rank_group import RankError, RankGroup
from vllm.executor.ranks.rank_wire import RecordTokens, ReleaseRequests, RunStep, result_decoder
from vllm.executor.ranks.worker_call import WorkerCall, name_to_send, refuse_code
from vllm.executor.step_thread import has_core_to_spare
from vllm.executor.uniproc import UniProcExecutor
from vllm.message_codec import decode_value
from vllm.messages import EngineRequest, ModelRunnerOutput, SchedulerOutput, StepTokens
from vllm.platforms import resolve_platform
from vllm.utils.futures import wait_all
from vllm.utils.imports import load_class
from vllm.utils.process.forked_process import can_fork
from vllm.worker.interface import StepHandleLike, Worker

_Result = TypeVar("_Result")


class MultiprocExecutor(UniProcExecutor):
    """Runs several workers on one machine, one per rank.

    Args:
        config: config of the engine.
    """

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self._rendezvous: Rendezvous | None = None
        self._ranks: RankGroup | None = None
        self._loading: list[Future[bytes]] = []

    @property
    def failure_fd(self) -> int | None:
        """File descriptor that becomes readable when a rank fails."""
        return None if self._ranks is None else self._ranks.failure_fd

    def check_health(self) -> None:
        """Raise the error of a rank that has failed."""
        if self._ranks is not None:
            self._ranks.check()

    # ---- the start ------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the processes, which begin to load the model."""
        if self._ranks is not None:
            return
        are_copies = self._can_be_copied()
        self._rendezvous = Rendezvous.create(self._config.parallel)
        self._ranks = RankGroup(
            self._config, self._rendezvous, self._rendezvous.abort, are_copies=are_copies
        )
        self._loading = self._ranks.call(Worker.load.__name__, [])

    def _can_be_copied(self) -> bool:
        """Return whether workers may be forks of this process. If so, import their class, because a
        fork has all modules that were imported before.
        """
        platform = resolve_platform(self._config.device.device)
        if not (platform.can_copy_process and can_fork()):
            return False
        load_class(platform.worker_class)
        return can_fork()  # forking is unsafe if an import has started threads

    def start_workers(self) -> None:
        """Start the processes, load the model on all ranks at the same time, and connect the
        ranks.
        """
        self.begin()
        with self._explained():
            self._load_worker()
        self._results(Worker.load, self._loading)
        self.call_workers(Worker.join)

    def _has_core_to_spare(self) -> bool:
        return has_core_to_spare(self._config.parallel.world_size)

    def call_workers(self, method: Callable[..., _Result], *args: Any) -> list[_Result]:
        """Call a method on all ranks at the same time."""
        calls = self._running_ranks.call(method.__name__, args)
        own_args = (self._rendezvous,) if method is Worker.join else args
        with self._explained():
            own = super().call_workers(method, *own_args)
        return own + self._results(method, calls)

    def _results(
        self, method: Callable[..., _Result], calls: "Sequence[Future[bytes]]"
    ) -> list[_Result]:
        decode = result_decoder(method)
        return [decode(value) for value in self._running_ranks.results(method.__name__, calls)]

    # ---- steps ----------------------------------------------------------------------------

    def execute_model(self, step: SchedulerOutput) -> StepHandleLike:
        """Start a step on all ranks."""
        ranks, result = self._running_ranks, None
        if self._config.parallel.pipeline_parallel_size > 1:
            result = ranks.expect_step(step.step_id)
        ranks.broadcast(RunStep(step=step))
        with self._explained():
            return _RunningStep(super().execute_model(step), result, self)

    def _finish_step(self, result: "Future[ModelRunnerOutput]") -> ModelRunnerOutput:
        """Wait for the result of the last stage, and send the sampled tokens to the other
        stages.
        """
        parallel = self._config.parallel
        layout, limit_s = RankLayout.of(parallel), parallel.distributed_timeout_s
        try:
            output = result.result(limit_s)
        except FutureTimeoutError:
            raise CollectiveError(
                "a step of the pipeline",
                0,
                f"the last stage (rank {layout.result_rank}) has returned no result within "
                f"{limit_s} s (--distributed-timeout-s)",
            ) from None
        if len(output.rows):
            tokens = StepTokens.of(output)
            self._record_tokens(tokens)
            self._running_ranks.broadcast(RecordTokens(tokens=tokens), layout.ranks_without_tokens)
        return output

    def prepare(self, request: EngineRequest) -> "Future[str | None] | None":
        """Load on all ranks in the background what a request needs.

        Raises:
            RequestError: the request contains code, which cannot be sent to other processes.
        """
        refuse_code(self._config.parallel, request)
        future = super().prepare(request)
        if future is None and request.adapter is None and not request.media:
            return None
        # Wait for all ranks: a step can only run when each of them has the data.
        return wait_all([future, *self._running_ranks.prepare(request)])

    def release(self, request_ids: Sequence[str]) -> None:
        """Release what the ranks hold for finished requests. If a rank has failed, the next step
        reports it.
        """
        with contextlib.suppress(RankError):
            self._running_ranks.broadcast(ReleaseRequests(request_ids=list(request_ids)))
        super().release(request_ids)

    def run_call(self, call: WorkerCall) -> list[Any]:
        """Call a method of all workers. Arguments and results must be plain values.

        Raises:
            RequestError: the call is not possible; also if the method is a function, which cannot
                be sent.
        """
        name = name_to_send(call.method)
        started = monotonic()
        calls = self._running_ranks.call(name, call.args, call.kwargs, is_user=True)
        own = super().run_call(call)
        results = self._running_ranks.results(f"{name}()", calls, call.timeout, started)
        return own + [decode_value(value) for value in results]

    def shutdown(self) -> None:
        """Finish the steps that were started, then end the other processes and shut down rank 0."""
        super().shutdown()
        if self._ranks is not None:
            self._ranks.close()
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._ranks = self._rendezvous = None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Replace an error of rank 0 that was caused by another rank with the cause."""
        try:
            yield
        except RequestError:
            raise
        except ConfigError as error:  # the start failed
            self._running_ranks.end(ConfigError(str(error)))
            raise
        except Exception as error:
            raise self._running_ranks.explain(error) from error

    @property
    def _running_ranks(self) -> RankGroup:
        if self._ranks is None:
            raise RuntimeError("the executor has not started, or has been shut down")
        return self._ranks


class _RunningStep:
    """A step in flight on all ranks.

    Args:
        handle: the step on rank 0.
        result: result from the last stage of a pipeline; None: use the result of rank 0.
        executor: executor that started the step.
    """

    def __init__(
        self,
        handle: StepHandleLike,
        result: "Future[ModelRunnerOutput] | None",
        executor: MultiprocExecutor,
    ) -> None:
        self._handle = handle
        self._result = result
        self._executor = executor

    def result(self) -> ModelRunnerOutput:
        """Wait for the result and return it."""
        with self._executor._explained():
            own = self._handle.result()
            if self._result is None:
                return own
            return self._executor._finish_step(self._result).with_errors(own.errors)
