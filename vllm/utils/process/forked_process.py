"""Run a function in a copy (fork) of this process.

A copy has all imported modules at once; a new interpreter takes seconds to import them. Only a
process without other threads can be copied: the copy has none of them, and a lock that one of them
held would stay locked for ever. A copy also keeps the memory of its parent, so what the parent
frees later stays allocated. That is why large processes are not copied.
"""

import contextlib
import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from typing import NoReturn

from vllm.utils.process.child_process import exit_with_parent

MAX_SHARED_BYTES = 2**30
"""More memory than this is not copied: libraries take 0.2 GB of it."""

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.0005, 0.05
_NUM_LOOKS = 10


def can_fork() -> bool:
    """Return whether this process can be copied: it runs on Linux, has only the main thread, and
    uses little memory.
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return False
    if threading.active_count() > 1 or _own_memory_bytes() > MAX_SHARED_BYTES:
        return False
    if _num_threads() > 1:
        # OpenBLAS, which numpy loads, stops its threads before a fork and creates new ones later. A
        # first fork finds out whether other threads remain.
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        for _ in range(_NUM_LOOKS):  # a thread that has ended may be listed for a moment
            if _num_threads() == 1:
                break
            time.sleep(_FIRST_WAIT_S)
    return _num_threads() == 1


class ForkedProcess:
    """A forked copy of this process, with the methods of `subprocess.Popen`. Check `can_fork`
    first.

    The copy exits with its parent (`exit_with_parent`). It keeps standard output and error and the
    given descriptors; all others are replaced by the null device. `sys.stdout` and `sys.stderr` are
    new, signals have their default action, and no object of the parent is ever finalised.

    Args:
        run: function that the copy runs; its result is the exit code.
        descriptors: file descriptors that the copy keeps.

    Raises:
        OSError: the system has too little memory for the copy.
    """

    def __init__(self, run: Callable[[], int], descriptors: Collection[int]) -> None:
        self._lock = threading.Lock()
        self.returncode: int | None = None
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, ValueError):  # no stream, or a closed one
                stream.flush()  # otherwise the child would write the buffered text again
        parent = os.getpid()
        # Block signals, so that no handler of the parent runs in the child.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _run_copy(run, descriptors, parent, before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def poll(self) -> int | None:
        """Return the exit code of the process, as `Popen.returncode`; None while it runs."""
        with self._lock:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # another thread has waited for it
                    self.returncode = 0
                else:
                    if pid:
                        self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait until the process has exited, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it has not exited within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        wait_s = _FIRST_WAIT_S
        while (code := self.poll()) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise subprocess.TimeoutExpired("a copy of this process", timeout)
            time.sleep(min(wait_s, left_s))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        return code

    def kill(self) -> None:
        """Kill the process; does nothing if it has exited."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _run_copy(
    run: Callable[[], int], descriptors: Collection[int], parent: int, signal_mask: Collection[int]
) -> NoReturn:
    """Run the function in the copy and exit, without returning to the code of the parent."""
    code = 1
    try:
        exit_with_parent(parent)
        gc.freeze()  # finalizers of the parent's objects must not run here
        _drop_descriptors({1, 2, *descriptors})
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        # In the parent these may be a buffer of a test or a notebook.
        sys.stdout, sys.stderr = _text_stream(1), _text_stream(2)
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
        code = run()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # reported here, because the caller's code belongs to the parent
        traceback.print_exc()
    finally:
        os._exit(code)


def _text_stream(descriptor: int) -> io.TextIOWrapper:
    raw = os.fdopen(descriptor, "wb", closefd=False)
    return io.TextIOWrapper(raw, errors="backslashreplace", line_buffering=True)


def _drop_descriptors(kept: Collection[int]) -> None:
    """Replace all other descriptors by the null device, so that an object that still uses one
    cannot damage a file opened later.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in kept and descriptor != null:
            # The descriptor of the listing itself is closed already.
            with contextlib.suppress(OSError):
                os.fstat(descriptor)
                os.dup2(null, descriptor, inheritable=descriptor == 0)


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _own_memory_bytes() -> int:
    """Return the number of bytes of this process's memory that do not come from a file."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
    return 0
