"""Run one rank in each process of a program that a launcher such as torchrun has started several
times (`distributed_executor_backend="external_launcher"`).

Every process runs the same program: it creates the same engine and gives it the same requests in
the same order. The engines make the same decisions, because none depends on time, and their workers
exchange tensors. So every process gets all outputs, and no step has to be sent. In a pipeline only
the last stage samples: its first rank writes each result to the store of the launcher, where the
other stages read it. If there are images, rank 0 also writes there which of them failed.
"""

import itertools
import json
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed

from vllm import envs
from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed import RankLayout, Rendezvous
from vllm.errors import CollectiveError, ConfigError
from vllm.executor.compared_settings import difference, settings_of_rank
from vllm.executor.ranks.rank_server import failure_of
from vllm.executor.ranks.rank_wire import (
    RankAssignment,
    RankFailed,
    decode_from_rank,
    result_decoder,
)
from vllm.executor.ranks.worker_call import make_worker
from vllm.executor.uniproc import UniProcExecutor
from vllm.message_codec import decoder, encode
from vllm.messages import ModelRunnerOutput, SchedulerOutput, StepTokens
from vllm.utils.clean_up import on_failure
from vllm.worker.interface import StepHandleLike, Worker

_ENGINES = itertools.count()
"""Counter of the engines of this process. Engines with the same number in all processes belong
together."""
_VALUE, _FAILURE = b"v", b"f"
_Result = TypeVar("_Result")
_decode_output = decoder(ModelRunnerOutput).decode
_decode_errors = decoder(dict[int, str]).decode


class ExternalExecutor(UniProcExecutor):
    """Runs the worker of this process, which is one of several ranks.

    Args:
        config: config of the engine.

    Raises:
        ConfigError: the launcher has not set the rank and the number of processes, the
            engine needs another number of processes, or its decisions would depend on time.
    """

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        parallel = config.parallel
        self._rank = _number("RANK")
        world_size = _number("WORLD_SIZE")
        if world_size != parallel.world_size or self._rank >= world_size:
            raise ConfigError(
                f"distributed_executor_backend='external_launcher': process RANK={self._rank} of "
                f"WORLD_SIZE={world_size} was started, but tensor_parallel_size * "
                f"pipeline_parallel_size is {parallel.world_size}. Start that many processes"
            )
        drafts = config.speculative.drafts
        if drafts is not None and drafts.adaptive:
            raise ConfigError(
                "with distributed_executor_backend='external_launcher', set adaptive to false in "
                "speculative_config: otherwise each process could choose a different number of "
                "drafts"
            )
        self._size = world_size
        num_local = _number("LOCAL_WORLD_SIZE", world_size)
        self._assignment = RankAssignment(
            index=_number("LOCAL_RANK", self._rank),
            count=num_local,
            has_own_devices=False,
            has_whole_stage=num_local == world_size,
        )
        self._rendezvous = _rendezvous(parallel, self._rank, self._assignment)
        self._calls = itertools.count()
        self._layout = RankLayout.of(parallel)
        self._results = itertools.count()
        self._has_media = config.model.resolved_arch.media_config is not None
        self._left: deque[str] = deque()
        """Values in the store that this rank has left, by name, the oldest first."""

    def start_workers(self) -> None:
        """Load the rank of this process, and connect to the other ranks.

        Raises:
            ConfigError: this rank or another one cannot be loaded, or was started differently.
            CollectiveError: another rank has failed.
        """
        self._compare_settings()
        self._agree(Worker.load, self._load_worker)
        self.call_workers(Worker.join, self._rendezvous)

    def _compare_settings(self) -> None:
        """Refuse ranks with settings that would lead to different decisions about steps."""
        ours = settings_of_rank(self._config)
        found = self._rendezvous.exchange("facts", json.dumps(ours).encode(), "settings")
        for rank, data in enumerate(found):
            if (differs := difference(ours, json.loads(data))) is not None:
                raise ConfigError(
                    f"distributed_executor_backend='external_launcher': {differs.name} is "
                    f"{differs.ours} on rank {self._rank} and {differs.theirs} on rank {rank}. "
                    "Start all ranks with the same version and the same arguments"
                )

    def _load_worker(self) -> None:
        worker = make_worker(self._config, self._rank, self._assignment)
        worker.load(self._rank)
        self._worker = worker

    def call_workers(self, method: Callable[..., _Result], *args: Any) -> list[_Result]:
        """Call a method of the worker of this process. All processes make the same call; returns
        the results of all.
        """
        worker = self._running_worker
        return self._agree(method, lambda: getattr(worker, method.__name__)(*args))

    def _agree(self, method: Callable[..., _Result], call: Callable[[], _Result]) -> list[_Result]:
        """Run a call and exchange the results. If it fails in one process, it fails in all of
        them.
        """
        if self._size == 1:
            return [call()]
        name = str(next(self._calls))
        try:
            value = call()
        except Exception as error:
            failure = _FAILURE + encode(failure_of(error))
            # If the process that serves the store has exited too, reporting the failure raises as
            # well; then abort.
            with on_failure(lambda: self._rendezvous.arrive(name, failure), self._rendezvous.abort):
                raise
        found = self._rendezvous.exchange(
            name, _VALUE + encode(value), f"results of {method.__name__}"
        )
        failures = {
            rank: decode_from_rank(data[1:])
            for rank, data in enumerate(found)
            if data[:1] == _FAILURE
        }
        if failures:
            raise _first_error(failures)
        decode = result_decoder(method)
        return [
            value if rank == self._rank else decode(data[1:]) for rank, data in enumerate(found)
        ]

    def execute_model(self, step: SchedulerOutput) -> StepHandleLike:
        """Start a step on the rank of this process."""
        handle = super().execute_model(step)
        return handle if self._layout.pipeline_size == 1 else _SharedStep(handle, self)

    def _share_result(self, handle: StepHandleLike) -> ModelRunnerOutput:
        """Return the result of a step. All processes must ask for results in the same order.

        Raises:
            CollectiveError: a stage has not written its part in time.
        """
        output, number = handle.result(), next(self._results)
        name, name_of_errors = f"result/{number}", f"errors/{number}"
        source, has_tokens = self._layout.result_rank, True
        errors = output.errors
        store: Any = self._rendezvous.store  # its type stubs only allow strings
        try:
            # First publish everything that other ranks wait for, then wait for others.
            if self._rank == source:
                self._leave(name, encode(output))
            if self._rank == 0 and self._has_media:
                self._leave(name_of_errors, encode(errors))
            if self._rank in self._layout.ranks_without_tokens:
                output, has_tokens = _decode_output(store.get(name)), False
            source = 0
            if self._rank and self._has_media:
                errors = _decode_errors(store.get(name_of_errors))
        except torch.distributed.DistError as error:
            what = f"the exchange of the result of rank {source}"
            raise CollectiveError(what, self._rank, self._rendezvous.reason_of(error)) from None
        if not has_tokens and len(output.rows):
            self._record_tokens(StepTokens.of(output))
        return output.with_errors(errors) if self._has_media else output

    def _leave(self, name: str, value: bytes) -> None:
        """Write a value to the store, and delete an old value that all other stages have read.

        All have read the value of a step once they are as many steps further as there are stages.
        """
        store: Any = self._rendezvous.store
        store.set(name, value)
        self._left.append(name)
        if len(self._left) > 2 * self._layout.pipeline_size:
            store.delete_key(self._left.popleft())

    def shutdown(self) -> None:
        """Drop the model and its caches, and disconnect from the other ranks."""
        super().shutdown()
        self._rendezvous.close()


class _SharedStep:
    """A step in flight whose result only the last stage has."""

    def __init__(self, handle: StepHandleLike, executor: ExternalExecutor) -> None:
        self._handle, self._executor = handle, executor
        self._output: ModelRunnerOutput | None = None

    def result(self) -> ModelRunnerOutput:
        """Wait for the result and share it with the other processes."""
        if self._output is None:
            self._output = self._executor._share_result(self._handle)
        return self._output


def _rendezvous(parallel: ParallelConfig, rank: int, assignment: RankAssignment) -> Rendezvous:
    host = envs.of_launcher("MASTER_ADDR")
    if not host:
        raise _missing("MASTER_ADDR")
    # torchrun itself serves the address; with other launchers rank 0 does.
    is_host = rank == 0 and envs.of_launcher("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address = (host, _number("MASTER_PORT"))
    return Rendezvous.at(
        parallel,
        rank,
        address,
        is_host=is_host,
        name=f"vllm-{next(_ENGINES)}",
        has_whole_stage=assignment.has_whole_stage,
    )


def _first_error(failures: dict[int, Any]) -> Exception:
    """Return the error of the rank that failed first. The others may have failed because they
    waited for it.
    """
    rank, failure = min(failures.items(), key=lambda item: (item[1].is_of_another, item[0]))
    assert isinstance(failure, RankFailed)
    if failure.is_config_error:
        return ConfigError(failure.message)
    return CollectiveError("the start", rank, failure.message)


def _number(name: str, default: int | None = None) -> int:
    text = envs.of_launcher(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdigit()):
        raise _missing(name)
    return int(text)


def _missing(name: str) -> ConfigError:
    given = envs.of_launcher(name)
    return ConfigError(
        f"distributed_executor_backend='external_launcher': the environment variable {name} is "
        f"{'not set' if given is None else repr(given)}. Start the program with a launcher that "
        f"sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, such as torchrun; or use 'mp' or "
        f"'ray', which start the workers themselves"
    )
