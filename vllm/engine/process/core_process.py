"""Run the process of an engine core: `python -m vllm.engine.process.core_process ADDRESS PARENT`.

It reads its first message, the configuration, from standard input, and all others from a ZMQ socket
that its parent has bound. Between two steps it handles the messages that have arrived; a step never
waits for a client. It exits with its parent, however the parent ended: on Linux the kernel kills
it, even while it is stopped; on other systems it notices the end of its standard input.
"""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from typing import NoReturn

import msgspec
import zmq

from vllm.config import VllmConfig
from vllm.engine.engine_core import EngineCore
from vllm.engine.fan_out import fan_out, known_ids
from vllm.engine.process import socket_folder
from vllm.engine.process.core_calls import CORE_CALLS
from vllm.engine.process.wire import (
    AbortRequests,
    AddRequests,
    CallCore,
    CoreFailed,
    CoreOutput,
    CoreProgress,
    CoreReady,
    FromCore,
    Refused,
    StartCore,
    ToCore,
    decode_to_core,
    encode,
    requests_apart,
)
from vllm.errors import CapacityError, ConfigError, RequestError, VllmError
from vllm.executor import make_executor
from vllm.logger import init_logger, use_format
from vllm.message_codec import CallError, CallResult, decode_arguments, encode_value
from vllm.messages import EngineOutput, EngineRequest
from vllm.platforms import resolve_platform
from vllm.utils.imports import without_collections
from vllm.utils.plugins import load_general_plugins
from vllm.utils.process import startup_progress
from vllm.utils.process.child_process import leave_signals_to_parent, set_parent_death_signal
from vllm.utils.process.frames import read_frame
from vllm.utils.process.process_memory import keep_for_good
from vllm.utils.process.program_end import end_program

logger = init_logger(__name__)

_STDIN = 0

_CONNECT_TIMEOUT_MS = 10_000

_LINGER_MS = 2000
"""Time for the parent to read the last messages."""


class CoreLoop:
    """Handles messages, runs steps and sends their outputs.

    Args:
        core: started engine core.
        receive: returns the next message as bytes; None if there is none and it must not wait.
        send: sends a message object.
    """

    def __init__(
        self,
        core: EngineCore,
        receive: Callable[[bool], bytes | None],
        send: Callable[[FromCore], None],
    ) -> None:
        self._core = core
        self._receive = receive
        self._send = send
        # Send the state of the warm-up from the start.
        self._has_unsent_stats = core.has_idle_work()

    def run(self) -> NoReturn:
        """Run until the parent kills the process, which is the normal end of a core.

        Raises:
            EngineDeadError: a step failed.
        """
        while True:
            self.turn()

    def turn(self) -> None:
        """Handle the messages that have arrived, and run one step if there are requests. Without
        requests, run one forward pass of the remaining warm-up.
        """
        self._take_messages()
        self._core.check_health()
        if self._core.has_unfinished_requests():
            self._send(CoreOutput(output=self._core.step(), stats=self._core.stats()))
            self._has_unsent_stats = False
        elif self._core.has_idle_work():
            self._core.idle_step()
            self._has_unsent_stats = True  # report the progress of the warm-up

    def _take_messages(self) -> None:
        """Handle all messages that have arrived; wait for one if there is nothing to do."""
        core = self._core
        while True:
            is_idle = not core.has_unfinished_requests()
            if is_idle and self._has_unsent_stats:
                self._send(CoreOutput(output=EngineOutput(), stats=core.stats()))
                self._has_unsent_stats = False
            data = self._receive(is_idle and not core.has_idle_work())
            if data is None:
                return
            try:
                message = decode_to_core(data)
            except msgspec.ValidationError as error:
                self._handle_apart(data, error)
            else:
                self._handle(message)

    def _handle_apart(self, data: bytes, error: msgspec.ValidationError) -> None:
        """Refuse those requests of a message that cannot be decoded, and handle the others."""
        parts = requests_apart(data)
        if not parts:
            raise error
        for request_id, part in parts.items():
            try:
                message = decode_to_core(part)
            except msgspec.ValidationError as own_error:
                self._refuse_unreadable(request_id, own_error)
            else:
                self._handle(message)

    def _refuse_unreadable(self, request_id: str, error: msgspec.ValidationError) -> None:
        text = f"the request cannot be read by the engine: {error}"
        for known_id in known_ids(request_id):
            self._send(Refused(request_id=known_id, message=text, status=400, is_capacity=False))

    def _handle(self, message: ToCore) -> None:
        if isinstance(message, AddRequests):
            for request in message.requests:
                for sample in fan_out(request):
                    self._add(sample)
        elif isinstance(message, AbortRequests):
            self._core.abort_requests(message.request_ids)
            self._has_unsent_stats = True
        elif isinstance(message, CallCore):
            self._send(self._call(message))

    def _add(self, request: EngineRequest) -> None:
        try:
            self._core.add_request(request)
        except (RequestError, CapacityError) as error:
            self._send(
                Refused(
                    request_id=request.request_id,
                    message=str(error),
                    status=error.status,
                    is_capacity=isinstance(error, CapacityError),
                    param=error.param if isinstance(error, RequestError) else None,
                )
            )

    def _call(self, message: CallCore) -> CallResult:
        try:
            assert message.name in CORE_CALLS, f"the engine core has no method {message.name}"
            args, kwargs = decode_arguments(message.arguments)
            value = getattr(self._core, message.name)(*args, **kwargs)
            encoded = encode_value(f"the result of {message.name}", value)
            return CallResult(call_id=message.call_id, value=encoded)
        except Exception as error:  # reported to the caller; the loop continues
            if not isinstance(error, (RequestError, CapacityError)):
                logger.exception("the call of %s failed", message.name)
            return CallResult(call_id=message.call_id, error=CallError.of(error))


def main(address: str, parent: int) -> int:
    """Run a core until it fails or is killed. Returns the exit code.

    Args:
        address: address of the parent's socket.
        parent: process id of the parent.
    """
    leave_signals_to_parent()
    connection = _Connection(address, parent)
    with without_collections():
        import_module("torch")  # takes seconds; meanwhile the parent reads the model's config
    keep_for_good(collect=False)
    try:
        start = decode_to_core(_read_start())
        assert isinstance(start, StartCore)
        use_format(start.log_format)
        return _run(start, connection)
    finally:
        connection.close()


class _Connection:
    """The socket to the parent. It is opened by `open` or the first message, not earlier, because
    it has threads.

    Args:
        address: address that the parent has bound.
        parent: process id of the parent.
    """

    def __init__(self, address: str, parent: int) -> None:
        self._address = address
        self._parent = parent
        self._context = zmq.Context(io_threads=1)
        self._poller: zmq.Poller | None = None

    def open(self) -> None:
        """Connect, if not yet connected, and remove the file of the socket, so that nothing is left
        if a process is killed.

        From here on the kernel kills this process together with its parent. Before, that would have
        left the file.
        """
        _ = self._socket

    @cached_property
    def _socket(self) -> "zmq.Socket[bytes]":
        made = self._context.socket(zmq.PAIR)
        made.set_hwm(0)
        made.linger = _LINGER_MS
        monitor = made.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        made.connect(self._address)
        # If the parent has died, this process removes the socket file, because the parent cannot.
        if os.getppid() != self._parent or monitor.poll(_CONNECT_TIMEOUT_MS):
            socket_folder.remove(self._address)
        made.disable_monitor()
        set_parent_death_signal(self._parent)
        return made

    def wake_for(self, descriptor: int | None) -> None:
        """Let waits for messages also end when this file descriptor is readable."""
        if descriptor is not None:
            self._poller = zmq.Poller()
            self._poller.register(self._socket, zmq.POLLIN)
            self._poller.register(descriptor, zmq.POLLIN)

    def send(self, message: FromCore) -> None:
        self._socket.send(encode(message))

    def receive(self, wait: bool) -> bytes | None:
        """Return the next message. None if there is none and `wait` is False, or if the wait was
        interrupted.
        """
        if wait and self._poller is not None:
            self._poller.poll()
            wait = False
        try:
            data: bytes = self._socket.recv(0 if wait else zmq.NOBLOCK)
        except zmq.Again:
            return None
        return data

    def close(self) -> None:
        """Close the socket after the parent has read the last messages; waits only briefly."""
        self._socket.close()
        self._context.term()


def _run(start: StartCore, connection: _Connection) -> int:
    send = connection.send
    executor = core = None
    try:
        config = config_of(start)
        executor = make_executor(config)
        executor.begin()  # before this process starts threads
        connection.open()
        threading.Thread(target=_set_parent_death_signal, daemon=True).start()
        startup_progress.listen(lambda *progress: send(_progress(*progress)))
        startup_progress.report("starting the worker")
        load_general_plugins()
        core = EngineCore(config, executor)
        startup_progress.listen(None)
        keep_for_good()
        connection.wake_for(core.failure_fd)
        send(CoreReady(stats=core.stats()))
        CoreLoop(core, connection.receive, send).run()
    except ConfigError as error:
        send(CoreFailed(message=str(error), is_config_error=True))
        return 2
    except VllmError as error:  # its message needs no traceback
        send(CoreFailed(message=str(error), is_config_error=False))
        return 1
    except Exception as error:  # last resort: the parent must be told about any error
        traceback.print_exc()
        send(CoreFailed(message=f"{type(error).__name__}: {error}", is_config_error=False))
        return 1
    finally:
        if core is not None:
            core.shutdown()
        elif executor is not None:
            executor.shutdown()


def config_of(start: StartCore) -> VllmConfig:
    """Create the config of the engine in this process, and register the models and devices that it
    names.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    for name, path in start.models.items():
        ModelRegistry.register_model(name, path)
    config = start.config
    # No progress bars in the log of a server.
    load = replace(
        config.load, use_tqdm_on_load=config.load.use_tqdm_on_load and sys.stderr.isatty()
    )
    device = replace(config.device, runs_with_server=True)
    parallel = config.parallel
    # Ray chooses the devices of its workers, which may be on any machine.
    if parallel.num_local_replicas > 1 and parallel.distributed_executor_backend != "ray":
        resolve_platform(config.device.device).set_replica(
            parallel.local_replica, parallel.num_local_replicas, parallel.world_size
        )
    return replace(config, load=load, device=device)


def _progress(phase: str, done: int, total: int, eta_seconds: float | None) -> CoreProgress:
    return CoreProgress(phase=phase, done=done, total=total, eta_seconds=eta_seconds)


def _read_start() -> bytes:
    try:
        _, data = read_frame(lambda size: os.read(_STDIN, size))
    except EOFError:
        sys.exit(1)  # the parent has died
    return data


def _set_parent_death_signal() -> None:
    # Read the descriptor and not sys.stdin: the interpreter cannot exit while a thread waits in
    # sys.stdin.
    os.read(_STDIN, 1)  # returns when the parent has exited and all copies of its end are closed
    os._exit(1)


if __name__ == "__main__":
    end_program(main(sys.argv[1], int(sys.argv[2])))
