"""Starts the process of an engine core, and exchanges messages with it in an event loop."""

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import zmq

from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.process import socket_folder
from vllm.engine.process.wire import (
    START_LENGTH,
    FromCore,
    StartCore,
    ToCore,
    decode_from_core,
    encode,
)
from vllm.logger import current_format, init_logger
from vllm.utils.child_process import ChildProcess

logger = init_logger(__name__)

_MAX_KILL_WAIT_S = 5.0
"""A killed process ends within milliseconds, unless the kernel keeps it: in a call of a device
driver, or while it frees much memory."""

_CHILD_DEFAULTS = {"GOMP_SPINCOUNT": "1000", "KINETO_LOG_LEVEL": "99"}
"""Environment of the process. Waiting OpenMP threads release their core to the API process sooner;
torch's profiler does not write its own lines into the log."""


class CoreClient:
    """Starts a core when constructed, and exchanges messages with it.

    Construct and configure it in any thread; call the other methods in the event loop of `attach`.
    """

    def __init__(self) -> None:
        self._address = socket_folder.make_address()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.bind(self._address)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_killed = self._is_closed = False
        module = "vllm.engine.process.core_process"
        self._child = ChildProcess(
            [sys.executable, "-m", module, self._address, str(os.getpid())],
            envs.child_environment(_CHILD_DEFAULTS, {"VLLM_LOGGING_FORMAT": current_format()}),
        )
        self.process = self._child.process

    @property
    def pid(self) -> int:
        """Process id of the core."""
        return self.process.pid

    def configure(self, config: VllmConfig, models: dict[str, str]) -> None:
        """Send the config, with which the process loads the model. Before that, the process imports
        modules.

        Args:
            config: of the engine.
            models: architectures that plug-ins have registered.
        """
        self._child.stop_limit_s = config.parallel.distributed_timeout_s
        data = encode(StartCore(config=config, models=models))
        assert self.process.stdin is not None
        # The process has ended, and may have been closed since: `on_death` reports it.
        with contextlib.suppress(BrokenPipeError, ValueError):
            self.process.stdin.write(START_LENGTH.pack(len(data)) + data)
            self.process.stdin.flush()

    def attach(
        self, on_message: Callable[[FromCore], None], on_death: Callable[[str], None]
    ) -> None:
        """Deliver messages to the running event loop; see `attach_raw`."""
        self.attach_raw(lambda data: on_message(decode_from_core(data)), on_death)

    def attach_raw(
        self, on_message: Callable[[bytes], None], on_death: Callable[[str], None]
    ) -> None:
        """Deliver encoded messages to the running event loop.

        Args:
            on_message: called with each message, in order.
            on_death: called once when the process has ended, after its last message, with the cause
                as far as it is known; not after `kill` or `close`.
        """
        loop = self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_death = on_death
        loop.add_reader(self._socket.fileno(), self._read)
        loop.call_soon(self._read)

        def tell(cause: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for this
                loop.call_soon_threadsafe(self._tell_end, cause)

        self._child.on_end(tell)

    def send(self, message: ToCore) -> None:
        """Send a message; one to a core that has ended is dropped.

        Raises:
            RequestError: it contains something that cannot be sent.
        """
        self.send_raw(encode(message))

    def send_raw(self, data: bytes) -> None:
        """Send an encoded message; one to a core that has ended is dropped."""
        if self._is_killed:
            return
        with contextlib.suppress(zmq.Again):  # the other end is closed: `on_death` will report it
            self._socket.send(data, zmq.NOBLOCK)
        assert self._loop is not None
        # ZMQ's file descriptor is edge-triggered: sending may have consumed the event of an arrived
        # message.
        self._loop.call_soon(self._read)

    def kill(self) -> None:
        """Kill the process, and deliver nothing of it any more; `close` releases its resources.
        Calling it again does nothing."""
        if self._is_killed:
            return
        self._is_killed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self.process.kill()

    def close(self) -> None:
        """Kill the process, wait for its end and release all resources. Calling it again does
        nothing. After `kill` it may be called in any thread.

        If the process does not end within seconds, a thread waits for it, so that the caller
        continues.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.kill()
        try:
            self.process.wait(_MAX_KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            logger.warning(
                "the engine process %d was killed, but has not ended after %.0f s: its memory and "
                "its device stay occupied until the kernel lets it end",
                *(self.pid, _MAX_KILL_WAIT_S),
            )
            threading.Thread(target=self._reap, name="core-reaper", daemon=True).start()
        else:
            self._reap()
        self._socket.close()
        self._context.term()
        socket_folder.remove(self._address)

    def _reap(self) -> None:
        """Wait for the process, then close our end of its standard input.

        Not earlier: a thread may still be writing the config to it.
        """
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def _read(self) -> None:
        while not self._is_killed:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_message(data)

    def _tell_end(self, cause: str) -> None:
        if self._is_killed:
            return
        self._read()
        self._on_death(cause)
