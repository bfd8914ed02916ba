"""Fork children from a process that has imported their modules, so that a fork takes milliseconds.

The libraries that compile grammars take seconds to import. Replacing a killed child would take as
long, so they are imported once, in a process with one thread that only forks. Its children share
its memory until they write to it.

    parent                                              fork server
    start   {module:function, setup}           ->       handler = module.function(setup)
    fork    one end of a socket pair           ->       os.fork(): the child answers calls there
            process id                         <-
    reap    process id                         ->       os.waitpid()

Independent of the work of the children: `serve_child` of the caller gets handler and socket.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm.errors import VllmError
from vllm.utils.frames import MAX_BYTES, FrameError, frame, read_exactly, read_frame
from vllm.utils.imports import without_collections
from vllm.utils.process.blocking_sockets import blocking_pair
from vllm.utils.process.child_process import describe_exit

Handler = Callable[..., bytes]
"""Takes an argument as bytes, and the descriptors of open files if the caller sends any."""

OK, FAILED = 0, 1
"""Kinds of frames."""
ALARM_GRACE_S = 2.0
"""The parent's deadline comes first; the alarm is for when there is no parent."""

_COMMAND = struct.Struct("<cQ")
"""Fork, or reap with the id of a process."""
_FORK, _REAP = b"F", b"R"
_FORK_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 1.0
"""Maximum number of seconds from the end of a connection to the end of the process that has closed
it."""
_TOO_LONG = "the call took too long"
_ENDED = "the worker process has ended: out of memory, or a crash"
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from vllm.utils.process.fork_server import _serve; _serve()"
)


class WorkerError(VllmError):
    """A call got no answer from its process."""


class DeadlineExceeded(WorkerError, TimeoutError):
    """The call took too long; its process was killed."""


class WorkerDied(WorkerError):
    """The process ended during the call: out of memory, or a crash in native code."""


class CallFailed(WorkerError):
    """The called function raised; str() is its message. The process continues."""


class _Start(msgspec.Struct):
    target: str
    setup: bytes
    child: str
    timeout_s: float


@dataclass(frozen=True)
class Child:
    """A process that answers calls.

    Attributes:
        pid: process id of the child, which no other process gets before
            `ForkServer.kill_and_remove`.
        connection: socket to it. Closing it ends an idle child.
    """

    pid: int
    connection: socket.socket


class ForkServer:
    """Forks children from one process. `start` or the first fork starts that process, and again if
    it died.

    Thread-safe.

    Args:
        target: "module:function"; called once in the process with `setup`, it returns the handler
            for all children.
        setup: argument of `target`.
        child: "module:function"; called in each child with the handler and its socket.
        start_timeout_s: time limit for the imports and `target`.

    Attributes:
        num_starts: number of times that the process was started; above one only if it died.
    """

    def __init__(
        self, target: str, setup: bytes, child: str, *, start_timeout_s: float = 120.0
    ) -> None:
        self.num_starts = 0
        self._start_message = msgspec.msgpack.encode(_Start(target, setup, child, start_timeout_s))
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._release: weakref.finalize[..., ForkServer] | None = None
        self._dead: list[int] = []

    @property
    def is_running(self) -> bool:
        """Whether the process exists. It may still be importing."""
        process = self._process
        return process is not None and process.poll() is None

    @property
    def pid(self) -> int | None:
        """Process id of the fork server; None before the first start."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process and wait until it can fork. Does nothing if it runs already.

        Raises:
            CallFailed: `target` raised; the message is its own.
            WorkerError: the process cannot be started.
        """
        with self._lock:
            self._running()

    def fork(self) -> Child:
        """Fork a new child, and start the process first if necessary.

        Raises:
            CallFailed: `target` raised; the message is its own.
            WorkerError: the process cannot be started.
        """
        with self._lock:
            control = self._running()
            ours, theirs = blocking_pair()
            deadline = time.monotonic() + _FORK_TIMEOUT_S
            try:
                while self._dead:
                    send(control, _COMMAND.pack(_REAP, self._dead.pop()), deadline)
                socket.send_fds(control, [_COMMAND.pack(_FORK, 0)], [theirs.fileno()])
                _, pid = _COMMAND.unpack(_receive(control, _COMMAND.size, deadline))
            except BaseException as error:
                ours.close()
                self._kill()
                if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                    raise WorkerDied("the fork server has ended") from error
                raise
            finally:
                theirs.close()
            return Child(pid, ours)

    def kill(self, child: Child) -> None:
        """Kill a child, even during a call. The waiting caller gets WorkerDied."""
        # If the fork server has exited, init has reaped the child, and the id may belong to another
        # process. The child then exits by itself: when its connection closes, or by its alarm.
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)

    def kill_and_remove(self, child: Child) -> None:
        """Kill a child and release its process id and connection. Call this once per child."""
        self.kill(child)
        self._dead.append(child.pid)
        child.connection.close()

    def close(self) -> None:
        """Kill the process, even while it starts. A later fork starts a new one."""
        if (process := self._process) is not None:
            process.kill()  # also ends a running start, which holds the lock
        with self._lock:
            self._kill()

    def _running(self) -> socket.socket:
        if self._control is not None and self.is_running:
            return self._control
        self._kill()
        control, theirs = blocking_pair()
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path)],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # libraries may print what users sent
            start_new_session=True,  # Ctrl-C goes to the parent only
        )
        theirs.close()
        self.num_starts += 1
        self._process, self._control = process, control
        self._release = weakref.finalize(self, _end, process, control)
        try:
            deadline = time.monotonic() + self._start_timeout_s
            send(control, frame(OK, self._start_message), deadline)
            status, answer = receive_frame(control, deadline)
        except BaseException as error:
            is_end = isinstance(error, (OSError, WorkerDied)) and not isinstance(
                error, TimeoutError
            )
            how = _how_ended(process) if is_end else ""
            self._kill()
            if is_end:
                raise WorkerDied(f"the fork server has ended while it started{how}") from error
            raise
        if status == FAILED:
            self._kill()
            raise CallFailed(answer.decode())
        return control

    def _kill(self) -> None:
        if self._release is not None:
            self._release()
        self._process = self._control = self._release = None
        self._dead.clear()


def _how_ended(process: "subprocess.Popen[bytes]") -> str:
    """Return in parentheses how a process that has closed its connection exited; empty if it has
    not exited.
    """
    try:
        return f" ({describe_exit(process.wait(_END_TIMEOUT_S))})"
    except subprocess.TimeoutExpired:
        return ""


def _end(process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()


def send(
    connection: socket.socket, data: bytes, deadline: float, files: Sequence[int] = ()
) -> None:
    """Send all data, and the descriptors of open files.

    Raises:
        DeadlineExceeded: sending takes too long.
        OSError: the other end is closed.
    """
    _set_timeout(connection, deadline)
    try:
        if files:
            data = data[socket.send_fds(connection, [data], files) :]
        connection.sendall(data)
    except TimeoutError:
        raise DeadlineExceeded(_TOO_LONG) from None


def receive_frame(
    connection: socket.socket, deadline: float, max_bytes: int = MAX_BYTES
) -> tuple[int, bytes]:
    """Receive a frame, and return its kind and content.

    Raises:
        DeadlineExceeded: it does not arrive in time.
        WorkerDied: the other end is closed, or the frame is longer than `max_bytes`.
    """
    try:
        return read_frame(_receiver(connection, deadline), max_bytes)
    except EOFError:
        raise WorkerDied(_ENDED) from None
    except FrameError as error:
        raise WorkerDied(f"the answer of the worker process cannot be read: {error}") from None


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Receive exactly `size` bytes.

    Raises:
        DeadlineExceeded: they do not arrive in time.
        WorkerDied: the other end is closed.
    """
    try:
        return read_exactly(_receiver(connection, deadline), size)
    except EOFError:
        raise WorkerDied(_ENDED) from None


def _receiver(connection: socket.socket, deadline: float) -> Callable[[int], bytes]:
    """Return a function that reads at most the requested number of bytes, and raises
    DeadlineExceeded after the deadline.
    """

    def read(size: int) -> bytes:
        _set_timeout(connection, deadline)
        try:
            return connection.recv(size)
        except TimeoutError:
            raise DeadlineExceeded(_TOO_LONG) from None

    return read


def _set_timeout(connection: socket.socket, deadline: float) -> None:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise DeadlineExceeded(_TOO_LONG)
    connection.settimeout(left_s)


# ---- the process ------------------------------------------------------------------------------


def _serve() -> None:
    """Run the fork server: import and set up, then fork until the parent closes the connection."""
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    try:
        _, message = read_frame(control.recv)
    except EOFError:
        return
    start = msgspec.msgpack.decode(message, type=_Start)
    signal.setitimer(signal.ITIMER_REAL, start.timeout_s + ALARM_GRACE_S)
    try:
        with without_collections():
            handler = _find(start.target)(start.setup)
    except Exception as error:  # all errors are reported to the parent
        text = (str(error) or repr(error)).encode(errors="replace")
        control.sendall(frame(FAILED, text))
        return
    serve_child = _find(start.child)
    signal.setitimer(signal.ITIMER_REAL, 0)
    # Freeze objects, so that the garbage collector does not write to memory that children share.
    gc.collect()
    gc.freeze()
    control.sendall(frame(OK, b""))
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, _COMMAND.size, 1)
        if not data:
            return
        command, pid = _COMMAND.unpack(data)
        if command == _REAP:
            with contextlib.suppress(ChildProcessError):  # a child of an earlier server
                os.waitpid(pid, 0)
        elif (child := os.fork()) == 0:
            control.close()
            _run_child(serve_child, handler, descriptors[0])
        else:
            os.close(descriptors[0])
            control.sendall(_COMMAND.pack(_FORK, child))


def _find(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _run_child(serve_child: "Callable[..., object]", handler: Handler, descriptor: int) -> None:
    status = 1
    try:
        serve_child(handler, socket.socket(fileno=descriptor))
        status = 0
    finally:
        os._exit(status)  # skip exit handlers: they belong to the fork server
