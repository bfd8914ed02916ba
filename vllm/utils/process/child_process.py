"""Run a child process that exits with its parent, and report when it exits or is stopped."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # from linux/prctl.h
LOOK_S = 0.5

_SIGNALS: dict[int, str] = {
    signal.SIGKILL: (
        "probably out of memory: see the system log (dmesg) or the log of the container. Give "
        "it more memory, or lower the memory use of the engine"
    ),
    signal.SIGSEGV: "a crash of native code: please report it with the log",
    signal.SIGBUS: (
        "probably /dev/shm or the disk is full, or a file of the model was changed, or cannot "
        "be read now"
    ),
    signal.SIGILL: "probably a library was built for another processor than this one",
    signal.SIGABRT: "native code has aborted: the last lines of the log give the reason",
    signal.SIGFPE: "a crash of native code: please report it with the log",
}
"""Usual cause of a signal that ends a process."""


def describe_exit(code: int) -> str:
    """Describe in words how a process has exited.

    Args:
        code: exit code, or -N for the signal N, as in `subprocess.Popen.returncode`.

    >>> describe_exit(2), describe_exit(-15)
    ('exit code 2', 'ended by signal 15, SIGTERM')
    """
    if code >= 0:
        return f"exit code {code}"
    number = -code
    if number == signal.SIGKILL:
        return f"killed by signal {number}, {_SIGNALS[number]}"
    text = f"ended by signal {number}"
    with contextlib.suppress(ValueError):  # real-time signals have no names
        text += f", {signal.Signals(number).name}"
    return f"{text}, {_SIGNALS[number]}" if number in _SIGNALS else text


def leave_signals_to_parent() -> None:
    """Ignore SIGINT and SIGTERM, which a terminal or a service manager sends to all processes. The
    parent decides when this process exits.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def set_parent_death_signal(parent: int) -> None:
    """Make the kernel kill this process when the *thread* that started it exits, even while this
    process is stopped.

    Args:
        parent: process id of the parent. If the parent is already a different process, this process
            exits.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def exit_with_parent(parent: int) -> None:
    """Let only the parent decide when this process exits: it ignores SIGINT and SIGTERM, and is
    killed when the parent exits.
    """
    leave_signals_to_parent()
    set_parent_death_signal(parent)


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show for this process, at most 15 characters."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process (SIGSTOP)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


class ChildProcess:
    """Starts a process in a thread, which also waits for its end.

    Args:
        command: command line of the process.
        environment: environment variables of the process.

    Attributes:
        process: the process; its standard input is a pipe.
        stop_limit_s: seconds for which a signal may stop the process before it is killed; None: no
            limit.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.stop_limit_s: float | None = None
        self._end: Future[str] = Future()
        started: Future[subprocess.Popen[bytes]] = Future()
        threading.Thread(
            target=self._run, args=(command, environment, started), name="child", daemon=True
        ).start()
        self.process = started.result()

    def on_end(self, callback: Callable[[str], None]) -> None:
        """Register a function to call, in another thread, after the process has exited. It gets the
        reason as text.
        """
        self._end.add_done_callback(lambda end: callback(end.result()))

    def _run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        started: "Future[subprocess.Popen[bytes]]",
    ) -> None:
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        cause = None
        # Another thread or the owner's `close` may already have waited for the process.
        with contextlib.suppress(ChildProcessError):
            while cause is None and _next_stop(process.pid):
                cause = self._watch_stopped(process)
        code = process.wait()
        self._end.set_result(cause or describe_exit(code))

    def _watch_stopped(self, process: "subprocess.Popen[bytes]") -> str | None:
        """Wait until a stopped process continues, or kill it after the limit and return the
        reason.
        """
        # Count the checks instead of reading a clock: this process may also have been stopped, for
        # example by Ctrl-Z.
        num_looks = 0
        while is_stopped(process.pid):
            limit_s = self.stop_limit_s
            if limit_s is not None and num_looks * LOOK_S >= limit_s:
                process.kill()
                return f"it was stopped by a signal (SIGSTOP) for {limit_s:g} s, and killed"
            time.sleep(LOOK_S)
            num_looks += 1
        return None


def _next_stop(pid: int) -> bool:
    """Wait until a signal stops a process (True) or the process exits (False). Its exit code
    remains available to others.

    Raises:
        ChildProcessError: another thread has taken the exit code.
    """
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    if found is None or found.si_code != os.CLD_STOPPED:
        return False
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG)  # consume the report of the stop
    return True
