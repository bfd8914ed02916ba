"""Start the process of an engine core, notice when it dies, and restart it if allowed.

Everything except starting a process happens in one event loop.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, Protocol

from vllm.config import VllmConfig
from vllm.engine.fan_out import known_ids
from vllm.engine.process.core_client import CoreClient
from vllm.engine.process.replay_log import ReplayLog
from vllm.engine.process.startup_state import StartupState
from vllm.engine.process.wire import (
    AddRequests,
    CallCore,
    CoreFailed,
    CoreOutput,
    CoreProgress,
    CoreReady,
    FromCore,
    Refused,
    ToCore,
)
from vllm.errors import CapacityError, ConfigError, EngineDeadError, RequestError, WorkerCallError
from vllm.logger import init_logger
from vllm.message_codec import CallResult, decode_value, encode_arguments
from vllm.messages import EngineRequest
from vllm.model_executor.models.registry import ModelRegistry

logger = init_logger(__name__)


MAX_TOGETHER = 32
"""Requests that are sent together. The core can begin with them while more are prepared."""


class Core(Protocol):
    """The process of a core, on this machine or another one."""

    @property
    def pid(self) -> int | None:
        """Process id, if the process is on this machine."""
        ...

    def configure(self, config: VllmConfig, models: dict[str, str]) -> None:
        """Send the config, with which the core loads the model. Called once, in any thread."""
        ...

    def attach(
        self, on_message: Callable[[FromCore], None], on_death: Callable[[str], None]
    ) -> None:
        """Deliver messages to the running event loop, and report the end of the process; see
        `CoreClient.attach_raw`.
        """
        ...

    def send(self, message: ToCore) -> None:
        """Send a message. If the core has ended, the message is dropped.

        Raises:
            RequestError: it contains something that cannot be sent.
        """
        ...

    def kill(self) -> None:
        """Kill the core without waiting, and deliver none of its messages any more. A second call
        does nothing.
        """
        ...

    def close(self) -> None:
        """End the core, wait for its end, and release all resources. A second call does nothing.
        After `kill` it may be called in any thread.
        """
        ...


def start_core_here() -> "asyncio.Future[Core]":
    """Launch a core on this machine, which begins to import modules.

    The result is not a task, so that the end of the event loop does not cancel it and the new
    process can still be ended.
    """
    loop = asyncio.get_running_loop()
    return loop.run_in_executor(None, lambda: CoreClient())


class CoreSupervisor:
    """Starts and watches one core process at a time.

    Args:
        num_restarts: how often a core that died is restarted.
        suffix: names the core in messages, such as " of replica 1".
        start_core: waits for a process on another machine; None: a process of this machine is
            started.
        first_phase: name of the phase before the config is sent, for progress reports.
        changes: changes in all cores, which a restarted core gets before any request.
        on_output: called with the output of each step.
        on_refused: called with each request that the core refuses.
        on_lost: called with the error of a core that has died and lost all its requests.

    Attributes:
        startup: state of the start.
        num_restarts_done: how often a core was restarted.
        death_callbacks: called once when the core is dead and will not be restarted.
    """

    def __init__(
        self,
        num_restarts: int,
        suffix: str = "",
        start_core: "Callable[[], asyncio.Future[Core]] | None" = None,
        first_phase: str = "importing PyTorch and the engine",
        *,
        changes: ReplayLog,
        on_output: Callable[[CoreOutput], None],
        on_refused: Callable[[Refused], None],
        on_lost: Callable[[BaseException], None],
    ) -> None:
        self.startup = StartupState()
        self._suffix = suffix
        self._start_core, self._first_phase = start_core, first_phase
        self.num_restarts_done = 0
        self.death_callbacks: list[Callable[[BaseException], None]] = []
        self._restarts_left = num_restarts
        self._changes = changes
        self._on_output = on_output
        self._on_refused = on_refused
        self._on_lost = on_lost
        self._core: Core | None = None
        self._ready: asyncio.Future[None] | None = None
        self._failure: CoreFailed | None = None
        self._restart_task: asyncio.Task[None] | None = None
        self._closing: asyncio.Future[None] | None = None
        self._spawning: asyncio.Task[asyncio.Future[None]] | None = None
        self._added: list[EngineRequest] = []
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._is_stopped = False

    @property
    def pid(self) -> int | None:
        """Process id of the core; None if there is no process."""
        return None if self._core is None else self._core.pid

    def prepare(self) -> None:
        """Start the process in the background. It imports modules until `start` configures it."""
        if self._spawning is None:
            self._spawning = asyncio.get_running_loop().create_task(self._start_process())
            # Read the exception, so that asyncio does not report it as never retrieved; `start`
            # raises it.
            self._spawning.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def start(self, config: VllmConfig, loaded: "asyncio.Future[None]") -> None:
        """Start a core; returns when it can compute requests.

        Args:
            config: config of the core.
            loaded: future that is done when the rest of the engine is loaded; the core is not ready
                before.

        Raises:
            ConfigError: it cannot start with this config.
            EngineDeadError: its process has ended.
        """
        try:
            self.prepare()
            assert self._spawning is not None
            ready = await self._spawning
            self._config = config
            await self._configure()
            await asyncio.shield(loaded)
            await ready
        except BaseException as error:
            self.startup.set_failed(error)
            self._release()
            raise
        self.startup.set_ready()

    def give_up(self, error: BaseException) -> None:
        """End the process after the start has failed, in this replica or another one."""
        if self._spawning is not None:
            self._spawning.cancel()
        self.startup.set_failed(error)
        self._release()

    async def restart(self) -> None:
        """Stop the core and start another one, even if it has exited for good. Its requests fail.
        Returns when the new core can compute requests.

        Raises:
            ConfigError, EngineDeadError: it could not be started.
        """
        assert not self._is_stopped
        error = EngineDeadError("the engine process is being restarted")
        self._release_behind()
        self._begin_restart(error)
        await self.startup.wait()

    def add(self, request: EngineRequest) -> None:
        """Send a request to the running core.

        Requests that are added in the same iteration of the event loop are sent in one message;
        otherwise a step would begin with the first one, and the others would wait for it. A request
        that cannot be sent is refused (`on_refused`).

        Raises:
            EngineDeadError: no core runs.
        """
        self._check_runs()
        self._added.append(request)
        if len(self._added) == 1:
            asyncio.get_running_loop().call_soon(self._send_added)
        elif len(self._added) >= MAX_TOGETHER:
            self._send_added()

    def send(self, message: ToCore) -> None:
        """Send a message to the running core, after the requests that were added before.

        Raises:
            EngineDeadError: no core runs.
        """
        self._check_runs()
        self._send_added()
        assert self._core is not None
        self._core.send(message)

    def _check_runs(self) -> None:
        if self._core is None or not self.startup.is_ready:
            raise self.dead_error

    def _send_added(self) -> None:
        requests, self._added = self._added, []
        if not requests or self._core is None:
            return
        try:
            self._core.send(AddRequests(requests=requests))
        except RequestError:
            for request in requests:
                self._send_alone(self._core, request)

    def _send_alone(self, core: Core, request: EngineRequest) -> None:
        try:
            core.send(AddRequests(requests=[request]))
        except RequestError as error:
            for known_id in known_ids(request.request_id):
                self._on_refused(
                    Refused(
                        request_id=known_id,
                        message=str(error),
                        status=error.status,
                        is_capacity=False,
                        param=error.param,
                    )
                )

    @property
    def dead_error(self) -> BaseException:
        """The reason why no request can be computed now."""
        return self.startup.error or EngineDeadError(
            f"the engine{self._suffix} is not ready: {self.startup.phase}"
        )

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of `CoreCalls` in the core, between two steps.

        Args:
            name: name of the method.
            args, kwargs: arguments, which msgpack must be able to encode.

        Raises:
            RequestError: the arguments cannot be sent, or the method refuses them.
            CapacityError: the call is not possible now.
            WorkerCallError: the call has failed.
            EngineDeadError: the core has died.
        """
        return await self._call(self.send, name, args, kwargs)

    def stop(self, error: EngineDeadError) -> None:
        """End the core for good. Everything that waits for it fails with the error."""
        self._is_stopped = True
        if self._restart_task is not None:
            self._restart_task.cancel()
        self.startup.set_failed(error)
        self._fail_calls(error)
        self._release()

    # ---- internals ------------------------------------------------------------------------

    async def _call(
        self,
        send: Callable[[ToCore], None],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        arguments = encode_arguments(args, kwargs)
        call_id = next(self._call_ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            send(CallCore(call_id=call_id, name=name, arguments=arguments))
            return await future
        finally:
            self._calls.pop(call_id, None)

    async def _start_process(self) -> "asyncio.Future[None]":
        """Start a process that waits for its config. The returned future is done when the core is
        ready.
        """
        self._failure = None
        self.startup.report(self._first_phase)
        spawned = (self._start_core or start_core_here)()
        try:
            core = await asyncio.shield(spawned)
        except asyncio.CancelledError:  # the event loop is closing
            spawned.add_done_callback(_close_core)
            raise
        if self._is_stopped:
            core.close()
            raise EngineDeadError("the engine was shut down")
        self._core = core
        self._ready = asyncio.get_running_loop().create_future()
        core.attach(self._on_message, self._on_end)
        return self._ready

    async def _configure(self) -> None:
        if self._core is not None:
            self.startup.report(self._first_phase)
            await asyncio.to_thread(self._core.configure, self._config, ModelRegistry.plugins())

    def _on_message(self, message: FromCore) -> None:
        if isinstance(message, CoreOutput):
            self._on_output(message)
        elif isinstance(message, CoreProgress):
            self.startup.report(message.phase, message.done, message.total, message.eta_seconds)
        elif isinstance(message, Refused):
            self._on_refused(message)
        elif isinstance(message, CallResult):
            self._on_call_result(message)
        elif isinstance(message, CoreFailed):
            self._failure = message
            # Report it now: the process and its workers take longer to exit.
            self._on_end("it has failed")
        elif isinstance(message, CoreReady) and self._ready is not None:
            self._ready.set_result(None)

    def _on_call_result(self, message: CallResult) -> None:
        future = self._calls.pop(message.call_id, None)
        if future is None or future.done():
            return
        if message.error is not None:
            future.set_exception(message.error.exception())
        else:
            future.set_result(decode_value(message.value))

    def _on_end(self, cause: str) -> None:
        error = self._error_of(cause)
        self._release_behind()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)  # raised to the caller of `start`
        else:
            logger.error("%s", error)
            self._lose(error)

    def _error_of(self, cause: str) -> ConfigError | EngineDeadError:
        if self._failure is None:
            return EngineDeadError(f"the engine process{self._suffix} has ended ({cause})")
        if self._failure.is_config_error:
            return ConfigError(self._failure.message)
        message = self._failure.message
        return EngineDeadError(f"the engine process{self._suffix} has failed: {message}")

    def _lose(self, error: BaseException) -> None:
        """Fail all requests of a core that has died; start another core, or give up."""
        self._fail_calls(error)
        if self._restarts_left > 0:
            self._restarts_left -= 1
            self._begin_restart(error)
            return
        self.startup.set_failed(error)
        self._on_lost(error)
        for callback in self.death_callbacks:
            callback(error)

    def _begin_restart(self, error: BaseException) -> None:
        self._fail_calls(error)
        self.num_restarts_done += 1
        self.startup.set_unready("restarting the engine")
        self._on_lost(error)
        self._restart_task = asyncio.get_running_loop().create_task(self._restart())

    async def _restart(self) -> None:
        core: Core | None = None
        try:
            if self._closing is not None:
                await self._closing  # then its memory and its device are free
            ready = await self._start_process()
            await self._configure()
            await ready
            core = self._core
            async with self._changes.lock:
                await self._repeat_changes(core)
                if core is None or self._core is not core:
                    return  # the core has exited since; the supervisor reports that
                self.startup.set_ready()
        except Exception as error:  # also system errors: no memory, no process, no disk space
            if core is not None and self._core is not core:
                return  # the core exited during the call; the supervisor reports that
            self._release_behind()
            if not self._is_stopped:
                logger.error("the engine%s could not be restarted: %s", self._suffix, error)
                is_told = isinstance(error, (ConfigError, EngineDeadError))
                self._lose(error if is_told else EngineDeadError(repr(error)))
            return
        logger.info("the engine%s was restarted", self._suffix)

    async def _repeat_changes(self, core: Core | None) -> None:
        """Apply the recorded changes (such as sleep) to a new core.

        Raises:
            EngineDeadError: the changes cannot be applied, or the core has ended.
        """
        for change in self._changes.calls:
            if core is None or self._core is not core:
                return
            self.startup.report(f"repeating {change.what}")
            try:
                await self._call(core.send, change.method.__name__, change.args, {})
            except (RequestError, CapacityError, WorkerCallError) as error:
                raise EngineDeadError(
                    f"{change.what} could not be repeated after the restart of the engine: {error}"
                ) from error

    def _fail_calls(self, error: BaseException) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._calls.clear()

    def _take_core(self) -> "Core | None":
        core, self._core = self._core, None
        self._added.clear()
        return core

    def _release(self) -> None:
        if (core := self._take_core()) is not None:
            core.close()

    def _release_behind(self) -> None:
        """Kill the core, and wait for its end in a thread.

        Freeing much memory or a device takes the system seconds, in which the event loop serves the
        requests of other cores.
        """
        if (core := self._take_core()) is not None:
            core.kill()
            self._closing = asyncio.get_running_loop().run_in_executor(None, core.close)


def _close_core(started: "asyncio.Future[Core]") -> None:
    if not started.cancelled() and started.exception() is None:
        started.result().close()
