"""Calls that must end: run in a process of their own, which is killed when they do not.

For work on what users send whose cost nobody can know beforehand: compiling a grammar, rendering a
template. The process answers one call at a time; bytes go in, bytes come out, nothing is pickled.

    parent                                         child
    start   {setup, sys.path, memory}   ->         handler = module.function(setup)
    call    argument                    ->         handler(argument)
            (0, result) or (1, message) <-         or what it raised, as text

A child outlives neither its parent nor its call: it ends when its input does, and the kernel's
alarm ends it if the parent dies in the middle of a call. (Not by PR_SET_PDEATHSIG: that is about
the thread that made the child, and callers use short-lived ones.)
"""

import contextlib
import importlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from vllm.errors import VllmError

Handler = Callable[[bytes], bytes]

_HEADER = struct.Struct("<BQ")
"""Status and length of what follows."""
_OK, _FAILED = 0, 1
_ALARM_GRACE_S = 2.0
"""The parent's deadline comes first; the alarm is for when there is no parent."""
_MAX_ANSWER_BYTES = 2**28
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from vllm.utils.deadline_worker import _serve; _serve()"
)


class WorkerError(VllmError):
    """A call brought no answer."""


class DeadlineExceeded(WorkerError, TimeoutError):
    """The call took too long; its process was killed."""


class WorkerDied(WorkerError):
    """The process ended during the call: out of memory, or a crash in native code."""


class CallFailed(WorkerError):
    """The called function raised; the message is its own. The process goes on."""


class _Start(msgspec.Struct):
    target: str
    setup: bytes
    max_memory_bytes: int


class DeadlineWorker:
    """One child process, started by the first call and again after one that killed it.

    Thread-safe: calls wait for each other.

    Args:
        target: "module:function"; called once in the child with `setup`, returns the function that
            answers the calls. Exceptions of either reach the caller as `CallFailed`.
        setup: for `target`.
        max_memory_bytes: what calls may add to the address space of the child.
        start_timeout_s: for the imports and the setup.
    """

    def __init__(
        self,
        target: str,
        setup: bytes = b"",
        *,
        max_memory_bytes: int = 2 * 2**30,
        start_timeout_s: float = 120.0,
    ) -> None:
        self._start_message = msgspec.msgpack.encode(_Start(target, setup, max_memory_bytes))
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._release: weakref.finalize[..., DeadlineWorker] | None = None

    def start(self) -> None:
        """Start the process now and wait until it can be called; nothing happens if it runs.

        Raises:
            WorkerError: it cannot be started.
        """
        with self._lock:
            self._running_process()

    def call(self, argument: bytes, timeout_s: float) -> bytes:
        """The handler's answer.

        Args:
            argument: for the handler.
            timeout_s: seconds from when the process has the argument; the start of a process and
                the wait for other calls are not part of it.

        Raises:
            DeadlineExceeded: no answer in time. The process is dead.
            WorkerDied: the process ended by itself.
            CallFailed: the handler raised.
        """
        with self._lock:
            return self._exchange(self._running_process(), argument, timeout_s)

    def close(self) -> None:
        """Kill the process, in the middle of a call if need be. A later call starts another."""
        if (process := self._process) is not None:
            process.kill()  # ends a call that is under way, and with it the wait for the lock
        with self._lock:
            self._kill()

    def _running_process(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._kill()
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # libraries print what users sent
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the parent
        )
        self._process = process
        self._release = weakref.finalize(self, _end, process)
        self._exchange(process, self._start_message, self._start_timeout_s)
        return process

    def _exchange(
        self, process: "subprocess.Popen[bytes]", argument: bytes, timeout_s: float
    ) -> bytes:
        deadline = time.monotonic() + timeout_s
        try:
            # The alarm's seconds travel with the call.
            frame = struct.pack("<d", timeout_s) + argument
            _write(process, _HEADER.pack(_OK, len(frame)) + frame, deadline)
            status, length = _HEADER.unpack(_read(process, _HEADER.size, deadline))
            if length > _MAX_ANSWER_BYTES:
                raise WorkerDied(f"the worker process answered with {length} bytes")
            answer = _read(process, length, deadline)
        except BaseException as error:
            # Half an answer may be under way: nobody must take it for the next one's.
            self._kill()
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                raise WorkerDied("the worker process has ended") from error
            raise
        if status == _FAILED:
            raise CallFailed(answer.decode())
        return answer

    def _kill(self) -> None:
        if self._release is not None:
            self._release()
        self._process = self._release = None


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # a write that was cut off has nowhere to go
            pipe.close()


def _wait(pipe: "BinaryIO", deadline: float, *, to_write: bool) -> None:
    poll = select.poll()
    poll.register(pipe, select.POLLOUT if to_write else select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise DeadlineExceeded("the call took too long")


def _write(process: "subprocess.Popen[bytes]", data: bytes, deadline: float) -> None:
    pipe = process.stdin
    assert pipe is not None
    view = memoryview(data)
    while view:
        _wait(pipe, deadline, to_write=True)  # type: ignore[arg-type]
        # No more than what a pipe that can be written to takes without blocking.
        view = view[os.write(pipe.fileno(), view[: select.PIPE_BUF]) :]


def _read(process: "subprocess.Popen[bytes]", size: int, deadline: float) -> bytes:
    pipe = process.stdout
    assert pipe is not None
    parts = bytearray()
    while len(parts) < size:
        _wait(pipe, deadline, to_write=False)  # type: ignore[arg-type]
        part = os.read(pipe.fileno(), min(size - len(parts), 2**20))
        if not part:
            raise WorkerDied("the worker process has ended: out of memory, or a crash")
        parts += part
    return bytes(parts)


# ---- the child --------------------------------------------------------------------------------


def _serve() -> None:
    """Answer calls until the input ends."""
    calls, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    handler: Handler = _make_handler
    while (call := _next_call(calls)) is not None:
        timeout_s, argument = call
        signal.setitimer(signal.ITIMER_REAL, timeout_s + _ALARM_GRACE_S)
        try:
            if handler is _make_handler:
                handler, answer = _started(argument), b""
            else:
                answer = handler(argument)
            status = _OK
        except Exception as error:  # whatever it is, it belongs to the caller
            status, answer = _FAILED, (str(error) or repr(error)).encode(errors="replace")
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(_HEADER.pack(status, len(answer)) + answer)
        answers.flush()


def _make_handler(argument: bytes) -> bytes:
    raise AssertionError("not started")


def _next_call(calls: BinaryIO) -> tuple[float, bytes] | None:
    header = calls.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    frame = calls.read(_HEADER.unpack(header)[1])
    (timeout_s,) = struct.unpack_from("<d", frame)
    return timeout_s, frame[8:]


def _started(message: bytes) -> Handler:
    start = msgspec.msgpack.decode(message, type=_Start)
    module, _, function = start.target.partition(":")
    handler: Handler = getattr(importlib.import_module(module), function)(start.setup)
    _limit_memory(start.max_memory_bytes)
    return handler


def _limit_memory(more_bytes: int) -> None:
    """Let the address space grow by this much, where the system can say how large it is."""
    try:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, now + more_bytes))
