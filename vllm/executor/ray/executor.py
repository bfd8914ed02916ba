"""Run workers as actors of a Ray cluster, on one machine or several.

An actor gets the same messages as a process of `multiproc`, as bytes, and handles them in the same
way. All ranks are actors, because the engine's own machine may have no device.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed import RankLayout, ranks_text
from vllm.errors import CollectiveError, ConfigError
from vllm.executor.base import Executor
from vllm.executor.ranks.rank_group import RankError, warn_of_wait
from vllm.executor.ranks.rank_wire import (
    CallRank,
    FromRank,
    PrepareRequest,
    RankFailed,
    RecordTokens,
    ReleaseRequests,
    RunStep,
    StartRank,
    StepResult,
    ToRank,
    decode_from_rank,
    result_decoder,
)
from vllm.executor.ranks.worker_call import WorkerCall, name_to_send, refuse_code
from vllm.executor.ray.placement import Placement, place_ranks
from vllm.executor.ray.utils import import_ray, initialize_ray_cluster, leave_ray_cluster
from vllm.executor.ray.watch import WATCH_GROUP, ActorWatch, exit_reason
from vllm.logger import init_logger
from vllm.message_codec import CallResult, decode_value, encode, encode_arguments
from vllm.messages import EngineRequest, ModelRunnerOutput, RunnerStats, SchedulerOutput, StepTokens
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import resolve_platform
from vllm.version import __version__
from vllm.worker.interface import StepHandleLike, Worker

_Result = TypeVar("_Result")

logger = init_logger(__name__)

_NOTICE_TIMEOUT_S = 10.0
"""Maximum number of seconds from the end of an exchange to the report of the worker that has ended
it."""


class RayExecutor(Executor):
    """Runs the workers in a Ray cluster.

    Args:
        config: config of the engine.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._layout = RankLayout.of(config.parallel)
        self._ray: Any = None
        self._has_joined = False
        self._placement: Placement | None = None
        self._actors: list[Any] = []
        self._watch: ActorWatch | None = None
        self._call_ids = itertools.count()
        self._unread: dict[Any, int] = {}
        """Answers that nobody has waited for -> rank."""
        self._stats = RunnerStats()
        # The messages of the next step can be sent while a step runs.
        self.is_asynchronous = config.scheduler.async_scheduling

    @property
    def failure_fd(self) -> int | None:
        """File descriptor that becomes readable when a rank fails."""
        return None if self._watch is None else self._watch.failure_fd

    def check_health(self) -> None:
        """Raise the error of a rank that has failed."""
        if self._watch is not None and self._watch.failure is not None:
            raise self._watch.failure

    # ---- the start ------------------------------------------------------------------------

    def start_workers(self) -> None:
        """Join the cluster, start the actors, load the model on all ranks, and connect the ranks.

        Raises:
            ConfigError: Ray is not installed, or there is no cluster, or it has too few resources.
        """
        self._start_actors()
        self.call_workers(Worker.load)
        self.call_workers(Worker.join)

    def _start_actors(self) -> None:
        from vllm.executor.ray.actor import RankActor

        config = self._config
        self._ray = ray = import_ray()
        self._has_joined = not ray.is_initialized()
        initialize_ray_cluster(config.parallel)
        platform = resolve_platform(config.device.device)
        resources = {"CPU": 1.0}
        if platform.name == "hpu":
            resources["HPU"] = 1.0
        self._placement = placement = place_ranks(config.parallel, resources)
        strategies = ray.util.scheduling_strategies
        more = {name: count for name, count in resources.items() if name != "CPU"}
        actor_class = ray.remote(concurrency_groups={WATCH_GROUP: 2})(RankActor)
        variables = envs.passed_on()
        counts_threads = "OMP_NUM_THREADS" not in variables
        for bundle in placement.bundles:
            options = actor_class.options(
                num_cpus=resources["CPU"],
                resources=more,
                runtime_env={"env_vars": variables},
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    placement_group=placement.group, placement_group_bundle_index=bundle
                ),
            )
            self._actors.append(options.remote(counts_threads=counts_threads))
        self._check_versions()
        self._watch = ActorWatch(ray, self._actors)
        address = self._get([self._actors[0].open_address.remote()])[0]
        models = ModelRegistry.plugins()
        starts = [
            StartRank(config=config, rank=rank, models=models, assignment=assignment)
            for rank, assignment in enumerate(placement.assignments)
        ]
        self._answers(
            [
                actor.start.remote(encode(start), address)
                for actor, start in zip(self._actors, starts, strict=True)
            ],
            "start",
        )

    def _check_versions(self) -> None:
        """Check that all machines have the same version of this package.

        Raises:
            ConfigError: a machine has another version.
        """
        for rank, call in enumerate([actor.version.remote() for actor in self._actors]):
            try:
                (version,) = self._get([call])
            except self._ray.exceptions.RayError as error:
                raise exit_reason(rank, error) from error
            if version != __version__:
                raise ConfigError(
                    f"distributed_executor_backend='ray': the machine of rank {rank} has version "
                    f"{version} of vllm, but the engine has {__version__}. Install the same "
                    "version on all machines of the Ray cluster"
                )

    def call_workers(self, method: Callable[..., _Result], *args: Any) -> list[_Result]:
        """Call a method on all ranks at the same time."""
        decode = result_decoder(method)
        return [decode(answer.value) for answer in self._call(method.__name__, args)]

    def _call(
        self,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        is_user: bool = False,
        timeout: float | None = None,
    ) -> list[CallResult]:
        message = CallRank(
            call_id=next(self._call_ids),
            method=method,
            arguments=encode_arguments(args, kwargs or {}),
            is_user=is_user,
        )
        found = []
        for answers in self._answers(self._send(message), method, timeout):
            (answer,) = [each for each in answers if isinstance(each, CallResult)]
            if answer.error is not None:
                raise answer.error.exception()
            found.append(answer)
        return found

    # ---- steps ----------------------------------------------------------------------------

    def execute_model(self, step: SchedulerOutput) -> StepHandleLike:
        """Start a step on all ranks."""
        refs = self._send(RunStep(step=step))
        self._unread.update(
            (refs[rank], rank) for rank in range(len(refs)) if rank not in self._sources
        )
        return _RayStep(self, refs)

    @property
    def _sources(self) -> set[int]:
        """The ranks whose step results are waited for."""
        return {0, self._layout.result_rank}

    def finish_step(self, refs: Sequence[Any]) -> ModelRunnerOutput:
        """Wait for the result of a step, or until a rank fails.

        Args:
            refs: references to the answers, by rank.
        """
        limit_s = self._config.parallel.distributed_timeout_s
        deadline = time.monotonic() + limit_s
        waiting = {refs[rank]: rank for rank in self._sources}
        found: dict[int, StepResult] = {}
        while waiting:
            left_s = max(0.0, deadline - time.monotonic())
            ready, _ = self._ray.wait([*waiting, *self._unread], num_returns=1, timeout=left_s)
            if not ready:
                raise self._timeout_error(refs, limit_s)
            (ref,) = ready
            if ref not in waiting:
                self._read(ref, self._unread.pop(ref))
                continue
            rank = waiting.pop(ref)
            answers = self._read(ref, rank)
            (found[rank],) = [each for each in answers if isinstance(each, StepResult)]
        last = found[self._layout.result_rank]
        self._stats, output = last.stats, last.output
        if self._layout.pipeline_size > 1 and len(output.rows):
            told = self._layout.ranks_without_tokens
            tokens = RecordTokens(tokens=StepTokens.of(output))
            self._unread.update(zip(self._send(tokens, told), told, strict=True))
        return output.with_errors(found[0].output.errors)

    def prepare(self, request: EngineRequest) -> "Future[str | None] | None":
        """Tell the workers to load what a request needs. Its first step waits for that.

        Raises:
            RequestError: the request contains code, which cannot be sent.
        """
        refuse_code(self._config.parallel, request)
        if request.sampling_params.guided_decoding is not None or request.adapter is not None:
            self._tell(PrepareRequest(request=request))
        return None

    def release(self, request_ids: Sequence[str]) -> None:
        """Tell the workers to release what they hold for finished requests."""
        self._tell(ReleaseRequests(request_ids=list(request_ids)))

    def _tell(self, message: ToRank) -> None:
        """Send a message that has no answer to all workers."""
        self._unread.update((ref, rank) for rank, ref in enumerate(self._send(message)))

    def run_call(self, call: WorkerCall) -> list[Any]:
        """Call a method of all workers. Arguments and results must be plain values.

        Raises:
            RequestError: the call is not possible; also if the method is a function, which is not
                sent.
        """
        name = name_to_send(call.method)
        answers = self._call(name, call.args, call.kwargs, is_user=True, timeout=call.timeout)
        return [decode_value(answer.value) for answer in answers]

    def stats(self) -> RunnerStats:
        """Return the counters of the rank that sends results, as of its last step."""
        return self._stats

    def shutdown(self) -> None:
        """End the actors and release their resources. Leave the cluster if this engine joined
        it.
        """
        ray, placement = self._ray, self._placement
        if ray is None:  # Ray is not installed, or no actor was started
            return
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        # If the program has left Ray, its actors have ended, and a call would start a new local
        # cluster.
        is_there = ray.is_initialized()
        for actor in self._actors if is_there else ():
            ray.kill(actor)
        self._actors, self._placement, self._unread = [], None, {}
        if placement is not None and is_there:
            ray.util.remove_placement_group(placement.group)
        if self._has_joined:
            self._has_joined = False
            leave_ray_cluster()

    # ---- messages -------------------------------------------------------------------------

    def _send(self, message: ToRank, ranks: Sequence[int] | None = None) -> list[Any]:
        """Send a message, and return a reference to the answers of each rank."""
        if not self._actors:
            raise RuntimeError("the executor has not started, or has been shut down")
        data = encode(message)
        chosen = self._actors if ranks is None else [self._actors[rank] for rank in ranks]
        return [actor.handle.remote(data) for actor in chosen]

    def _answers(
        self, refs: Sequence[Any], method: str, timeout: float | None = None
    ) -> list[list[FromRank]]:
        """Return the answers to a call, by rank. Raise the failure of the first rank that fails.

        Without a `timeout`, a rank may work as long as it needs, but it must respond to pings.
        """
        ranks = {ref: rank for rank, ref in enumerate(refs)}
        found: dict[int, list[FromRank]] = {}
        waiting = list(refs)
        look_s = self._config.parallel.distributed_timeout_s
        deadline = None if timeout is None else time.monotonic() + timeout
        while waiting:
            left_s = look_s if deadline is None else max(0.0, deadline - time.monotonic())
            ready, waiting = self._ray.wait(waiting, num_returns=1, timeout=left_s)
            if not ready and deadline is not None:
                late = ranks_text([ranks[ref] for ref in waiting])
                raise TimeoutError(f"{late} did not answer {method} within {timeout} s")
            if not ready:
                self._check_answers(method)
                warn_of_wait(logger, method, [ranks[ref] for ref in waiting], look_s)
                continue
            rank = ranks[ready[0]]
            found[rank] = self._read(ready[0], rank)
        return [found[rank] for rank in range(len(refs))]

    def _timeout_error(self, refs: Sequence[Any], limit_s: float) -> CollectiveError:
        """Return the error for a step that took too long, with the ranks that have not finished. If
        a rank does not respond at all, raise an error about that.
        """
        what = "a step"
        self._check_answers(what)
        done, _ = self._ray.wait(list(refs), num_returns=len(refs), timeout=0)
        late = [rank for rank, ref in enumerate(refs) if ref not in done]
        late = late or [self._layout.result_rank]
        reason = f"{ranks_text(late)} has no result after {limit_s} s"
        return CollectiveError(what, late[0], reason)

    def _check_answers(self, what: str) -> None:
        """Check that all actors respond.

        Raises:
            CollectiveError: some actors do not respond.
        """
        assert self._watch is not None
        if silent := self._watch.unresponsive_ranks():
            reason = "its process is stopped, or its machine cannot be reached"
            text = f"{ranks_text(silent)} does not answer: {reason}"
            raise CollectiveError(what, silent[0], text)

    def _read(self, ref: Any, rank: int) -> list[FromRank]:
        """Read the answers of a rank that have arrived.

        Raises:
            ConfigError, RankError: the rank has failed.
        """
        try:
            answers = [decode_from_rank(data) for data in self._get([ref])[0]]
        except self._ray.exceptions.RayActorError as error:
            raise exit_reason(rank, error) from error
        for answer in answers:
            if isinstance(answer, RankFailed):
                if answer.is_config_error:
                    raise ConfigError(f"rank {rank}: {answer.message}")
                if answer.is_of_another:
                    self._raise_failure_of_another()
                raise RankError(f"rank {rank} failed: {answer.message}")
        return answers

    def _raise_failure_of_another(self) -> None:
        """Raise the error of an actor that exited without a message, or that does not respond, if
        there is one.
        """
        assert self._watch is not None
        if (failure := self._watch.wait(_NOTICE_TIMEOUT_S)) is not None:
            raise failure
        self._check_answers("an exchange")

    def _get(self, refs: Sequence[Any]) -> list[Any]:
        return self._ray.get(list(refs))


class _RayStep:
    """A step in flight on all Ray actors."""

    def __init__(self, executor: RayExecutor, refs: Sequence[Any]) -> None:
        self._executor = executor
        self._refs = refs

    def result(self) -> ModelRunnerOutput:
        return self._executor.finish_step(self._refs)
