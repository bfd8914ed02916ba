"""Fork children from a process that has imported their modules, so that a fork takes milliseconds.

The libraries that compile grammars take seconds to import. Replacing a killed child would take as
long, so they are imported once, in a process with one thread that only forks. Its children share
its memory until they write to it.

    parent                                              fork server
    start   {module:function, setup}           ->       handler = module.function(setup)
    fork    one end of a socket pair           ->       os.fork(): the child answers calls there
            process id                         <-
    kill    process id                         ->       os.kill() if this child is alive
                                                        os.waitpid() as soon as a child exits

Only the fork server kills children. Only it knows whether a process id still belongs to a child:
it waits for children that exit, and the system may then give their ids to other processes.

Independent of the work of the children: `serve_child` of the caller gets handler and socket.
"""

import contextlib
import gc
import importlib
import json
import os
import select
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
from vllm.utils.imports import without_collections
from vllm.utils.process.blocking_sockets import blocking_pair
from vllm.utils.process.child_process import describe_exit
from vllm.utils.process.frames import MAX_BYTES, FrameError, frame, read_exactly, read_frame

Handler = Callable[..., bytes]
"""Takes an argument as bytes, and the descriptors of open files if the caller sends any."""

OK, FAILED = 0, 1
"""Kinds of frames."""
ALARM_GRACE_S = 2.0
"""The parent's deadline comes first; the alarm is for when there is no parent."""

_COMMAND = struct.Struct("<cQ")
"""Fork, or kill the child with this process id."""
_FORK, _KILL = b"F", b"K"
_FORK_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 1.0
"""Maximum number of seconds from the end of a connection to the end of the process at one of its
ends."""
_MAX_SIGNALS = 4096
"""Signals that are read at once; each is one byte."""
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
        pid: process id of the child. After the child has exited, another process may get it.
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
        self._is_ready = False

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
        # Without the lock, because finalizers call this too; the system does not divide so short a
        # message. If the fork server has exited, the child exits by itself: when its connection
        # closes, or by its alarm.
        if (control := self._control) is not None:
            with contextlib.suppress(OSError):
                control.send(_COMMAND.pack(_KILL, child.pid))

    def kill_and_remove(self, child: Child) -> None:
        """Kill a child and close its connection. Call this once per child."""
        self.kill(child)
        child.connection.close()

    def close(self) -> None:
        """End the process and its children, even while it starts. A later fork starts a new one."""
        if (process := self._process) is not None and not self._is_ready:
            process.kill()  # ends a running start, which holds the lock
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
            start_new_session=True,  # only the parent gets Ctrl-C
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
        self._is_ready = True
        return control

    def _kill(self) -> None:
        if self._release is not None:
            self._release()
        self._process = self._control = self._release = None
        self._is_ready = False


def _how_ended(process: "subprocess.Popen[bytes]") -> str:
    """Return in parentheses how a process that has closed its connection exited; empty if it has
    not exited.
    """
    try:
        return f" ({describe_exit(process.wait(_END_TIMEOUT_S))})"
    except subprocess.TimeoutExpired:
        return ""


def _end(process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
    control.close()  # the process then kills its children and exits
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
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
    _Children(control, lambda connection: serve_child(handler, connection)).serve()


class _Children:
    """The children of a fork server: forks, kills, and waits for them.

    Args:
        control: connection to the parent.
        run: what a child does with its connection.
    """

    def __init__(self, control: socket.socket, run: "Callable[[socket.socket], object]") -> None:
        self._control, self._run = control, run
        self._alive: set[int] = set()

    def serve(self) -> None:
        """Follow the commands of the parent until it closes the connection; then kill all."""
        exits, notify = os.pipe()
        for end in (exits, notify):
            os.set_blocking(end, False)
        # Without a handler, the signal would be ignored and wake up nothing.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(notify, warn_on_full_buffer=False)
        waiting = select.poll()
        for file in (exits, self._control.fileno()):
            waiting.register(file, select.POLLIN)
        while True:
            ready = dict(waiting.poll())
            if exits in ready:
                os.read(exits, _MAX_SIGNALS)
                self._wait_exited()
            if self._control.fileno() in ready:
                data, descriptors, _, _ = socket.recv_fds(self._control, _COMMAND.size, 1)
                if not data:
                    break
                command, pid = _COMMAND.unpack(data)
                if command == _FORK:
                    self._fork(descriptors[0], (exits, notify))
                elif pid in self._alive:
                    os.kill(pid, signal.SIGKILL)
        for pid in self._alive:
            os.kill(pid, signal.SIGKILL)

    def _fork(self, connection: int, signals: Sequence[int]) -> None:
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for file in signals:
                os.close(file)
            self._control.close()
            _run_child(self._run, connection)
        os.close(connection)
        self._alive.add(pid)
        self._control.sendall(_COMMAND.pack(_FORK, pid))

    def _wait_exited(self) -> None:
        """Take the exit codes of all children that have exited, so that no zombies remain."""
        with contextlib.suppress(ChildProcessError):  # there are no children left
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                self._alive.discard(pid)


def _find(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _run_child(run: "Callable[[socket.socket], object]", descriptor: int) -> None:
    status = 1
    try:
        run(socket.socket(fileno=descriptor))
        status = 0
    finally:
        os._exit(status)  # skip exit handlers: they belong to the fork server
