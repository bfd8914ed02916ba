"""Exchange messages with the process of an engine core, in an event loop."""

import asyncio
import contextlib
from collections.abc import Callable

import zmq

from vllm.config import VllmConfig
from vllm.engine.process.core_launch import take_core
from vllm.engine.process.wire import START, FromCore, StartCore, ToCore, decode_from_core, encode
from vllm.logger import current_format
from vllm.utils.process.frames import frame


class CoreClient:
    """Takes over a core process on this machine (`take_core`), and exchanges messages with it.

    Construct and configure it in any thread; call the other methods in the event loop of `attach`.
    """

    def __init__(self) -> None:
        core = self._core = take_core()
        self._child = core.child
        self.process = core.child.process
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.bind(core.address)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_killed = self._is_closed = False

    @property
    def pid(self) -> int:
        """Process id of the core."""
        return self.process.pid

    def configure(self, config: VllmConfig, models: dict[str, str]) -> None:
        """Send the config, with which the process loads the model. Until then, the process imports
        modules.

        Args:
            config: config of the engine.
            models: architectures that plug-ins have registered.
        """
        self._child.stop_limit_s = config.parallel.distributed_timeout_s
        data = encode(StartCore(config=config, models=models, log_format=current_format()))
        assert self.process.stdin is not None
        # A broken pipe: the process has exited, and its input may be closed; `on_death` reports
        # that.
        with contextlib.suppress(BrokenPipeError, ValueError):
            self.process.stdin.write(frame(START, data))
            self.process.stdin.flush()

    def attach(
        self, on_message: Callable[[FromCore], None], on_death: Callable[[str], None]
    ) -> None:
        """Deliver decoded messages to the running event loop.

        Args:
            on_message: called with each message, in order.
            on_death: called once with the cause when the process has ended; see `attach_raw`.
        """
        self.attach_raw(lambda data: on_message(decode_from_core(data)), on_death)

    def attach_raw(
        self, on_message: Callable[[bytes], None], on_death: Callable[[str], None]
    ) -> None:
        """Deliver encoded messages to the running event loop.

        Args:
            on_message: called with each message, in order.
            on_death: called once with the cause, if it is known, when the process has ended, after
                its last message. Not called after `kill` or `close`.
        """
        loop = self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_death = on_death
        loop.add_reader(self._socket.fileno(), self._read)
        loop.call_soon(self._read)

        def tell(cause: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller is waiting
                loop.call_soon_threadsafe(self._tell_end, cause)

        self._child.on_end(tell)

    def send(self, message: ToCore) -> None:
        """Send a message. If the core has ended, the message is dropped.

        Raises:
            RequestError: it contains something that cannot be sent.
        """
        self.send_raw(encode(message))

    def send_raw(self, data: bytes) -> None:
        """Send an encoded message. If the core has ended, the message is dropped."""
        if self._is_killed:
            return
        with contextlib.suppress(zmq.Again):  # the other end is closed; `on_death` reports that
            self._socket.send(data, zmq.NOBLOCK)
        assert self._loop is not None
        # ZMQ's file descriptor is edge-triggered: sending may have consumed the event of a message
        # that arrived. So look for messages now.
        self._loop.call_soon(self._read)

    def kill(self) -> None:
        """Kill the process and deliver none of its messages any more. `close` releases its
        resources. A second call does nothing.
        """
        if self._is_killed:
            return
        self._is_killed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self.process.kill()

    def close(self) -> None:
        """Kill the process, wait for its end and release all resources. A second call does nothing.
        After `kill` it may be called in any thread.

        If the process does not end within seconds, a thread waits for it, so that the caller can
        continue.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.kill()
        self._core.close()
        self._socket.close()
        self._context.term()

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
