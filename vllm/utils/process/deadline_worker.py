"""Run calls in a separate process, which is killed at a deadline.

For work on user input whose cost is not known beforehand: compiling a grammar, rendering a
template. The process answers one call at a time; input and output are bytes, nothing is pickled.

    parent                                         child
    call    argument, maybe open files  ->         handler(argument), handler(argument, files)
            (0, result) or (1, message) <-         or what it raised, as text

A child is forked by a `ForkServer` that has imported everything already, so after a process was
killed, the next call does not wait for imports. A child does not outlive its parent or its call: it
exits when its connection is closed, and the fork server kills it when the parent exits. If the
fork server has exited too, a kernel alarm ends the call.
"""

import contextlib
import os
import signal
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence

from vllm.utils.process.fork_server import (
    ALARM_GRACE_S,
    FAILED,
    OK,
    CallFailed,
    Child,
    DeadlineExceeded,
    ForkServer,
    Handler,
    WorkerDied,
    WorkerError,
    receive_frame,
    send,
)
from vllm.utils.process.frames import frame, read_frame

__all__ = [
    "CallFailed",
    "DeadlineExceeded",
    "DeadlineWorker",
    "WorkerDied",
    "WorkerError",
    "make_server",
]

_LIMITS = struct.Struct("<dQ")
"""Limits of a call: seconds until the alarm, and bytes by which the address space may grow."""
_MAX_ANSWER_BYTES = 2**28
_LOOK_S = 0.05
"""Seconds between two attempts to stop a call."""
_MAX_FILES = 8
"""Largest number of files of one call."""


def make_server(target: str, setup: bytes = b"", *, start_timeout_s: float = 120.0) -> ForkServer:
    """Create a fork server whose children answer calls. Nothing is started yet.

    Args:
        target: "module:function"; called once with `setup`, it returns the function that answers
            the calls. Exceptions of that function reach the caller as `CallFailed`.
        setup: argument of `target`.
        start_timeout_s: time limit for the imports and the setup.
    """
    child = "vllm.utils.process.deadline_worker:_serve_calls"
    return ForkServer(target, setup, child, start_timeout_s=start_timeout_s)


class DeadlineWorker:
    """A child process that answers calls. The first call forks it, and so does the first call after
    it was killed.

    Thread-safe: calls wait for each other.

    Args:
        server: forks the process; several workers may share one.
        max_memory_bytes: how much calls may enlarge the address space of the child.
    """

    def __init__(self, server: ForkServer, *, max_memory_bytes: int = 2 * 2**30) -> None:
        self._server = server
        self._max_memory_bytes = max_memory_bytes
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._release: weakref.finalize[..., DeadlineWorker] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the child; None if there is no child."""
        child = self._child
        return None if child is None else child.pid

    def start(self) -> None:
        """Start the process unless it is ready for a call.

        Raises:
            WorkerError: it cannot be started.
        """
        with self._lock:
            self._ready_child()

    def call(self, argument: bytes, timeout_s: float, files: Sequence[int] = ()) -> bytes:
        """Call the handler and return its answer.

        Args:
            argument: argument of the handler.
            files: descriptors of open files. If there are any, the handler gets copies of them as
                its second argument; they are closed after the call.
            timeout_s: seconds, counted from when the process has the argument. The start of a
                process and the wait for other calls do not count.

        Raises:
            DeadlineExceeded: there was no answer in time. The process was killed.
            WorkerDied: the process ended by itself.
            CallFailed: the handler raised.
        """
        with self._lock:
            return self._exchange(self._ready_child(), argument, timeout_s, files)

    def close(self) -> None:
        """Kill the process, even during a call. A later call starts a new one."""
        self._end_call()
        while not self._lock.acquire(timeout=_LOOK_S):
            self._end_call()  # the process of the call may have been forked meanwhile
        try:
            self._kill()
        finally:
            self._lock.release()

    def _end_call(self) -> None:
        """Abort a running call, so that the lock becomes free."""
        if (child := self._child) is not None:
            self._server.kill(child)
            with contextlib.suppress(OSError):  # already closed
                # Also ends the child if the fork server is gone.
                child.connection.shutdown(socket.SHUT_RDWR)

    def _ready_child(self) -> Child:
        if self._child is not None and _is_open(self._child.connection):
            return self._child
        self._kill()
        self._child = self._server.fork()
        self._release = weakref.finalize(self, self._server.kill_and_remove, self._child)
        return self._child

    def _exchange(
        self, child: Child, argument: bytes, timeout_s: float, files: Sequence[int]
    ) -> bytes:
        deadline = time.monotonic() + timeout_s
        try:
            limits = _LIMITS.pack(timeout_s, self._max_memory_bytes)
            send(child.connection, frame(OK, limits + argument), deadline, files)
            status, answer = receive_frame(child.connection, deadline, _MAX_ANSWER_BYTES)
        except BaseException as error:
            # A part of an answer may have arrived. It must not be read as the next answer.
            self._kill()
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                raise WorkerDied("the worker process has ended") from error
            raise
        if status == FAILED:
            raise CallFailed(answer.decode())
        return answer

    def _kill(self) -> None:
        if self._release is not None:
            self._release()
        self._child = self._release = None


def _is_open(connection: socket.socket) -> bool:
    """Return whether the process at the other end is alive. It sends nothing while there is no
    call.
    """
    connection.settimeout(0)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


# ---- the child --------------------------------------------------------------------------------


def _serve_calls(handler: Handler, connection: socket.socket) -> None:
    """Answer calls until the connection is closed."""
    is_limited = False
    files: list[int] = []

    def read(size: int) -> bytes:
        data, received, _, _ = socket.recv_fds(connection, size, _MAX_FILES)
        files.extend(received)
        return data

    while True:
        try:
            _, call = read_frame(read)
        except EOFError:
            return
        timeout_s, max_memory_bytes = _LIMITS.unpack_from(call)
        if not is_limited:
            _limit_memory(max_memory_bytes)
            is_limited = True
        signal.setitimer(signal.ITIMER_REAL, timeout_s + ALARM_GRACE_S)
        try:
            argument = call[_LIMITS.size :]
            answer, status = handler(argument, list(files)) if files else handler(argument), OK
        except Exception as error:  # all errors are reported to the caller
            answer, status = (str(error) or repr(error)).encode(errors="replace"), FAILED
        signal.setitimer(signal.ITIMER_REAL, 0)
        while files:
            os.close(files.pop())
        connection.sendall(frame(status, answer))


def _limit_memory(more_bytes: int) -> None:
    """Limit how much the address space of this process may grow, if the system reports its size."""
    try:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, now + more_bytes))
