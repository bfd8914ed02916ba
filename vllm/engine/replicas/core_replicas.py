"""Divide requests among the replicas of an engine, each of which is one core process.

Everything happens in one event loop. With one replica, calls are only forwarded.
"""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from vllm.config import ParallelConfig, VllmConfig
from vllm.engine.process.core_supervisor import CoreSupervisor
from vllm.engine.process.replay_log import ReplayLog
from vllm.engine.process.startup_state import StartupState
from vllm.engine.process.wire import AbortRequests, CoreOutput, Refused
from vllm.engine.replicas.remote_cores import RemoteEngineCores
from vllm.engine.replicas.replica_calls import ReplicaCalls
from vllm.engine.replicas.replica_router import ReplicaRouter
from vllm.engine.resolve.replicas import replica_configs
from vllm.errors import CapacityError, ConfigError, EngineAsleepError, EngineDeadError, RequestError
from vllm.logger import init_logger
from vllm.messages import EngineRequest, SchedulerStats
from vllm.utils.futures import end_tasks
from vllm.utils.process import startup_progress

logger = init_logger(__name__)

_DRAIN_POLL_S = 0.02

_ALL_DRAINED = "every replica that is ready is being drained. Try again later"


class ReplicaState(NamedTuple):
    """The state of one replica."""

    replica: int
    """Index, from 0."""
    state: str
    """ready, draining (gets no new requests), failed, or a phase of its start."""
    pid: int | None
    num_requests: int
    """Requests that the replica has not finished."""
    num_tokens: int
    """Tokens to compute, as the router counts them."""
    restarts: int


class CoreReplicas:
    """Starts the cores of all replicas, sends requests to them and collects their answers.

    If a replica dies, its own requests fail. The others keep serving; the engine is dead when all
    replicas are dead.

    Args:
        parallel: how many replicas there are, and on which machines.
        num_restarts: how often a core that died is restarted, for each replica.
        on_output: called with the index of a replica and the output of its step.
        on_refused: called with each request that a core refuses.
        on_lost: called with the index of a replica that has died, its error, whether it is being
            restarted, and the ids of its failed requests.

    Attributes:
        startup: common state of all replicas: ready after all became ready, and as long as one is
            ready.
        stats: the latest statistics of each replica.
        calls: calls methods of all cores.
        death_callbacks: called once when all replicas are dead.
    """

    def __init__(
        self,
        parallel: ParallelConfig,
        num_restarts: int,
        *,
        on_output: Callable[[int, CoreOutput], None],
        on_refused: Callable[[Refused], None],
        on_lost: Callable[[int, BaseException, bool, list[str]], None],
    ) -> None:
        num_replicas, num_local = parallel.data_parallel_size, parallel.num_local_replicas
        self.stats = [SchedulerStats()] * num_replicas
        self.death_callbacks: list[Callable[[BaseException], None]] = []
        self._on_output = on_output
        self._on_lost = on_lost
        self._draining: set[int] = set()
        self._router: ReplicaRouter | None = None
        self._has_started = False
        self._remote: RemoteEngineCores | None = None
        if num_local < num_replicas:
            self._remote = RemoteEngineCores(
                parallel.data_parallel_address,
                parallel.data_parallel_rpc_port,
                range(num_local, num_replicas),
            )
        changes = ReplayLog()
        self._all = [
            CoreSupervisor(
                num_restarts,
                "" if num_replicas == 1 else f" of replica {index}",
                *self._start_of(index, num_local),
                changes=changes,
                on_output=partial(self._take_output, index),
                on_refused=on_refused,
                on_lost=partial(self._lose, index),
            )
            for index in range(num_replicas)
        ]
        self.calls = ReplicaCalls(self._all, changes, self.forget_prefixes)
        if num_replicas == 1:
            self.startup = self._all[0].startup
        else:
            self.startup = StartupState()
            for replica in self._all:
                replica.startup = StartupState(self._note_change, is_logged=False)
        for replica in self._all:
            replica.death_callbacks.append(self._note_death)

    def _start_of(self, index: int, num_local: int) -> tuple[Any, ...]:
        """Return the arguments with which a replica on another machine is started; empty for a
        local replica.
        """
        if self._remote is None or index < num_local:
            return ()
        return partial(
            self._remote.wait_for_core, index
        ), f"waiting for the machine of replica {index}"

    def __len__(self) -> int:
        return len(self._all)

    @property
    def pids(self) -> list[int | None]:
        """Process ids of the cores; None for a replica without a process."""
        return [replica.pid for replica in self._all]

    @property
    def num_restarts_done(self) -> int:
        """Number of times that cores were restarted."""
        return sum(replica.num_restarts_done for replica in self._all)

    @property
    def dead_error(self) -> BaseException:
        """The reason why no request can be computed now."""
        return self._all[0].dead_error if len(self._all) == 1 else self._none_ready()

    @property
    def refusal(self) -> str | None:
        """Reason why a running engine refuses new requests now; None if it accepts them."""
        if sleeping := self.calls.sleeping_parts:
            return str(EngineAsleepError(sleeping))
        ready = {index for index, each in enumerate(self._all) if each.startup.is_ready}
        return _ALL_DRAINED if ready and ready <= self._draining else None

    # ---- start and end --------------------------------------------------------------------

    def prepare(self) -> None:
        """Start the processes in the background. They import modules until `start` configures
        them."""
        for replica in self._all:
            replica.prepare()

    async def start(
        self, resolve: Callable[[], VllmConfig], meanwhile: Callable[[VllmConfig], None]
    ) -> None:
        """Start the cores; returns when all of them can compute requests.

        Args:
            resolve: returns the config of the engine; runs in a thread while the processes start.
            meanwhile: called in a thread with the config while the cores load.

        Raises:
            ConfigError: a core cannot start with this config.
            EngineDeadError: a process has ended.
        """
        self.prepare()
        tasks: list[asyncio.Future[None]] = []
        try:
            config = await asyncio.to_thread(self._resolve, resolve)
            configs = await asyncio.to_thread(replica_configs, config)
            # Replicas on other machines have their own config.
            configs += [config] * (len(self._all) - len(configs))
            self._router = ReplicaRouter(
                len(self._all),
                config.scheduler.max_num_seqs,
                has_prefix_cache=config.cache.enable_prefix_caching,
            )
            loaded = asyncio.ensure_future(asyncio.to_thread(meanwhile, config))
            tasks = [loaded]
            tasks += [
                asyncio.ensure_future(replica.start(each, loaded))
                for replica, each in zip(self._all, configs, strict=True)
            ]
            await asyncio.gather(*tasks)
        except BaseException as error:
            await end_tasks(tasks)
            for replica in self._all:
                replica.give_up(error)
            self.startup.set_failed(error)
            raise
        self._has_started = True
        self._note_change()

    def stop(self, error: EngineDeadError) -> None:
        """End the cores for good. Everything that waits for them fails with the error."""
        for replica in self._all:
            replica.stop(error)
        if self._remote is not None:
            self._remote.close()
        self.startup.set_failed(error)

    def _resolve(self, resolve: Callable[[], VllmConfig]) -> VllmConfig:
        """Run `resolve` in a thread, and report its progress.

        Raises:
            ConfigError: the config is wrong, or the workers can only run in the process of the
                caller.
        """
        startup_progress.listen(self.startup.report)
        try:
            config = resolve()
        finally:
            startup_progress.listen(None)
        if config.parallel.distributed_executor_backend == "external_launcher":
            raise ConfigError(
                "distributed_executor_backend='external_launcher' is for the offline engine (LLM), "
                "which each process of a launcher runs. Use 'mp' or 'ray' for a server"
            )
        return config

    # ---- requests -------------------------------------------------------------------------

    def choose(
        self, request: EngineRequest, core_ids: list[str], replica: int | None = None
    ) -> int:
        """Choose the replica for a request, and count the request as load of this replica.

        Args:
            request: request to compute.
            core_ids: ids of its samples in the core.
            replica: replica that the caller asks for; None: any.

        Raises:
            RequestError: there is no such replica.
            CapacityError: the replica accepts no requests now (status 503).
            EngineDeadError: no replica is ready.
        """
        if replica is not None:
            self._check_index(replica, "data_parallel_rank")
        candidates = [
            index
            for index, each in enumerate(self._all)
            if each.startup.is_ready and index not in self._draining and replica in (None, index)
        ]
        if not candidates:
            if replica is None and not any(each.startup.is_ready for each in self._all):
                raise self.dead_error
            raise CapacityError(
                _ALL_DRAINED
                if replica is None
                else (
                    f"data_parallel_rank={replica}: this replica accepts no requests now "
                    f"({self.states()[replica].state}). Try again later, or leave "
                    "data_parallel_rank out"
                ),
                status=503,
            )
        return self._running.choose(request, core_ids, candidates)

    def add(self, index: int, request: EngineRequest) -> None:
        """Send a request to the replica with this index.

        Raises:
            EngineDeadError: the replica is not ready.
        """
        self._all[index].add(request)

    def owner(self, core_id: str) -> int:
        """Return the replica that has a request; 0 if it has finished."""
        return self._running.owner(core_id) or 0

    def end(self, core_ids: Iterable[str]) -> None:
        """Record that requests have ended; unknown ids are ignored."""
        self._running.end(core_ids)

    def abort(self, core_ids: Iterable[str]) -> None:
        """Abort requests in the replicas that have them."""
        by_owner: dict[int, list[str]] = {}
        for core_id in core_ids:
            owner = self._running.owner(core_id)
            if owner is not None:
                by_owner.setdefault(owner, []).append(core_id)
        for owner, ids in by_owner.items():
            self._running.end(ids)
            if self._all[owner].startup.is_ready:
                self._all[owner].send(AbortRequests(request_ids=ids))

    def forget_prefixes(self) -> None:
        """Forget which prefixes were sent, because the prefix caches of all replicas were
        emptied."""
        self._running.forget_prefixes()

    # ---- one replica ----------------------------------------------------------------------

    def states(self) -> list[ReplicaState]:
        """Return the state of each replica."""
        loads = None if self._router is None else self._router.loads
        return [
            ReplicaState(
                replica=index,
                state=self._state(index),
                pid=replica.pid,
                num_requests=0 if loads is None else len(loads[index].requests),
                num_tokens=0 if loads is None else loads[index].num_tokens,
                restarts=replica.num_restarts_done,
            )
            for index, replica in enumerate(self._all)
        ]

    async def drain(self, index: int) -> None:
        """Stop sending requests to a replica; returns when it has none. `resume` undoes this.

        Raises:
            RequestError: there is no such replica.
            CapacityError: it was resumed before its last request had ended (status 409).
        """
        self._check_index(index)
        self._draining.add(index)
        while self._running.loads[index].requests:
            if index not in self._draining:
                raise CapacityError(
                    f"replica {index} was resumed before its last request had finished, so it is "
                    "not drained and is not restarted",
                    status=409,
                )
            await asyncio.sleep(_DRAIN_POLL_S)

    def resume(self, index: int) -> None:
        """Send requests to a replica again.

        Raises:
            RequestError: there is no such replica.
        """
        self._check_index(index)
        self._draining.discard(index)

    async def restart(self, index: int, timeout_s: float | None = None) -> None:
        """Drain a replica, and replace its process. The other replicas keep serving.

        Args:
            index: index of the replica, which may have died for good.
            timeout_s: seconds for its requests to finish; requests that are left then fail with an
                error. None: no limit.

        Raises:
            RequestError: there is no such replica.
            CapacityError: it is being started already, or was resumed before its last request had
                ended (status 409).
            ConfigError, EngineDeadError: it could not be started.
        """
        self._check_index(index)
        replica = self._all[index]
        if not (replica.startup.is_ready or replica.startup.error is not None):
            raise CapacityError(
                f"replica {index} is being started ({replica.startup.phase}). Wait for it",
                status=409,
            )
        try:
            if replica.startup.is_ready:
                try:
                    await asyncio.wait_for(self.drain(index), timeout_s)
                except asyncio.TimeoutError:
                    num_left = len(self._running.loads[index].requests)
                    logger.warning(
                        "restarting replica %d: %d requests did not finish in time and fail",
                        index,
                        num_left,
                    )
            if replica.startup.is_ready or replica.startup.error is not None:
                await replica.restart()
            else:
                # The replica has exited meanwhile and is being restarted.
                await replica.startup.wait()
        finally:
            self._draining.discard(index)

    # ---- internals ------------------------------------------------------------------------

    @property
    def _running(self) -> ReplicaRouter:
        assert self._router is not None, "the engine has not started"
        return self._router

    def _check_index(self, index: int, param: str = "replica") -> None:
        if not 0 <= index < len(self._all):
            raise RequestError(
                f"{param}={index}: this replica does not exist. This engine has {len(self._all)} "
                "replicas (--data-parallel-size), counted from 0",
                param=param,
            )

    def _state(self, index: int) -> str:
        startup = self._all[index].startup
        if startup.is_ready and index in self._draining:
            return "draining"
        return startup.phase

    def _none_ready(self) -> BaseException:
        if self.startup.error is not None:
            return self.startup.error
        return EngineDeadError(f"the engine is not ready: {self.startup.phase}")

    def _take_output(self, index: int, message: CoreOutput) -> None:
        self.stats[index] = message.stats
        output, router = message.output, self._running
        router.progress(index, output.request_ids)
        if output.finished:
            router.end(output.finished)
        self._on_output(index, message)

    def _lose(self, index: int, error: BaseException) -> None:
        self.stats[index] = SchedulerStats()
        core_ids = [] if self._router is None else self._router.drop_requests_of(index)
        will_return = self._all[index].startup.error is None
        self._on_lost(index, error, will_return, core_ids)

    def _note_change(self) -> None:
        """Update the common state after the state of one replica has changed."""
        if len(self._all) == 1:
            return
        states = [replica.startup for replica in self._all]
        waiting = [each for each in states if not each.is_ready and each.error is None]
        if not self._has_started:
            if waiting and self.startup.error is None:
                shown = waiting[0]
                eta_seconds = _latest([each.eta_seconds for each in waiting])
                self.startup.report(shown.phase, shown.done, shown.total, eta_seconds)
        elif any(each.is_ready for each in states):
            if not self.startup.is_ready:
                self.startup.set_ready()
        elif waiting:
            self.startup.set_unready(waiting[0].phase)
        elif self.startup.error is None:
            assert states[0].error is not None
            self.startup.set_failed(states[0].error)

    def _note_death(self, error: BaseException) -> None:
        if all(replica.startup.error is not None for replica in self._all):
            for callback in self.death_callbacks:
                callback(error)
        else:
            logger.error("the other replicas keep serving")


def _latest(etas: list[float | None]) -> float | None:
    """Return the largest of the estimates, because all replicas have to be ready; None if one is
    unknown.
    """
    known = [eta for eta in etas if eta is not None]
    return max(known) if len(known) == len(etas) else None
