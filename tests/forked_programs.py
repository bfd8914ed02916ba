"""Run programs of the package as forks of a process that has imported their modules already.

A new interpreter imports torch and the engine for two seconds of processor time, and tests start
some hundred ranks, engines and servers. `ForkingPopen` replaces `subprocess.Popen` where tests
start them: a command `python -m MODULE ...` of `PROGRAMS` becomes a fork, every other command a new
process. A fork has the arguments, environment, folder and descriptors of its command, and its
parent is the process that started it, as with a new interpreter.

    this process                                          preloaded process, with one thread
    send  {command, environment, ...}, descriptors  ->    fork; the fork forks again and exits
    become the parent of the second fork, as "subreaper"  the second fork runs the program
    wait, kill, ...                                 ->

What can fail only in a new interpreter, such as an import, is tested with new interpreters: the
server that most tests of the APIs share, a server that reads images, a server that starts slowly,
and a test each of an engine process, of ranks on the CPU and of ranks on simulated cards.
"""

import contextlib
import ctypes
import fcntl
import gc
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy

from vllm import envs, logger
from vllm.executor.ranks import child_rank
from vllm.utils.process import child_process
from vllm.utils.process.program_end import end_program

_WITH_ENGINES = ("vllm.entrypoints.cli.main", "vllm.entrypoints.openai.api_server")
"""Programs that start other programs."""
PROGRAMS = (
    "vllm.engine.process.core_process",
    "vllm.executor.ranks.rank_process",
    *_WITH_ENGINES,
    "tests.e2e.test_external_launcher",
)
"""Modules whose commands become forks."""

_PRELOADED = (
    "torch",
    *PROGRAMS[:-1],
    "vllm.executor.ranks.rank_server",
    "vllm.worker.cpu.worker",
    "vllm.worker.hpu.worker",
    "gaudi_sim.bridge",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.server.app",
    "vllm.entrypoints.server.uvicorn_server",
    "vllm.entrypoints.server.start_checks",
    "vllm.engine.async_llm_engine",
    "vllm.engine.resolve.early",
    "vllm.engine.resolve.config",
    "vllm.model_executor.models.llama",
    "safetensors.torch",
)

_PR_SET_CHILD_SUBREAPER = 36  # from linux/prctl.h
_MAX_BYTES = 1 << 18
_FIRST_DESCRIPTOR = 200
"""Descriptors that were sent are moved here and above, before they get the numbers they need."""
_LOOK_S = 0.0005
_PADDING = "-" * 2000
"""Room for the command lines of forks."""

_IMPORT_VARIABLES = (
    "OMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "TORCH_",
    "LD_",
    "MALLOC_",
    "PYTHON",
    "HF_",
)
_LATER_VARIABLES = ("PYTHONPATH", "PYTHONUNBUFFERED")
"""Libraries read variables with the former prefixes when they are imported, except the latter
ones. A command with other values of these becomes a new process."""

_POPEN = subprocess.Popen
_POPEN_OPTIONS = {"args", "env", "cwd", "stdin", "stdout", "stderr", "pass_fds"}


class Fork:
    """A fork, with the methods of `subprocess.Popen` that the callers use.

    Attributes:
        pid: process id.
        args: its command.
        stdin: pipe to its standard input; None: it has none.
        returncode: exit code, or -N for the signal N; None until it is known.
    """

    def __init__(self, pid: int, args: Sequence[str], stdin: Any) -> None:
        self.pid, self.args, self.stdin = pid, args, stdin
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
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

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has exited, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it has not exited within `timeout` seconds.
        """
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(self.pid)
                try:
                    waiting = select.poll()
                    waiting.register(descriptor, select.POLLIN)
                    waiting.poll(None if timeout is None else timeout * 1000)
                finally:
                    os.close(descriptor)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless the process has exited."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkingPopen:
    """Starts commands as forks if that is possible, as new processes otherwise.

    Args:
        control: socket to the preloaded process; None: start that process when it is needed.
    """

    def __init__(self, control: socket.socket | None = None) -> None:
        self._control = control
        self._process: subprocess.Popen[bytes] | None = None
        self._environment = dict(os.environ)
        self._lock = threading.Lock()

    def __call__(self, args: Sequence[str], **options: Any) -> Any:
        """Start a command, as `subprocess.Popen`."""
        environment = {**(options.get("env") or os.environ)}
        if not self._can_fork(args, options, environment):
            return subprocess.Popen(args, **options)
        ours = theirs = None
        opened = []
        streams = []
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            given = options.get(name)
            if given == subprocess.PIPE:
                theirs, ours = os.pipe()
                opened.append(theirs)
                streams.append(theirs)
            elif given == subprocess.DEVNULL:
                opened.append(os.open(os.devnull, os.O_RDWR))
                streams.append(opened[-1])
            elif given == subprocess.STDOUT:
                streams.append(streams[1])
            else:
                streams.append(number if given is None else given.fileno())
        numbers = [0, 1, 2, *options.get("pass_fds", ())]
        job = {
            "command": list(args),
            "environment": environment,
            "folder": os.fspath(options.get("cwd") or Path.cwd()),
            "numbers": numbers,
        }
        try:
            pid = self._start(json.dumps(job).encode(), [*streams, *numbers[3:]])
        finally:
            for descriptor in opened:
                os.close(descriptor)
        return Fork(pid, args, None if ours is None else os.fdopen(ours, "wb", 0))

    def _can_fork(
        self, args: Sequence[str], options: Mapping[str, Any], environment: Mapping[str, str]
    ) -> bool:
        if sys.platform != "linux" or subprocess.Popen is not _POPEN:  # a test has replaced it
            return False
        if not (options.keys() <= _POPEN_OPTIONS and list(args[:2]) == [sys.executable, "-m"]):
            return False
        if args[2] not in PROGRAMS or subprocess.PIPE in (
            options.get("stdout"),
            options.get("stderr"),
        ):
            return False
        return not any(
            environment.get(name) != self._environment.get(name)
            for name in {*environment, *self._environment}
            if name.startswith(_IMPORT_VARIABLES) and name not in _LATER_VARIABLES
        )

    def _start(self, message: bytes, descriptors: Sequence[int]) -> int:
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            self._preload()
            assert self._control is not None
            prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._control, [message], descriptors)
                pid = int(self._control.recv(100))
                assert self._control.recv(100) == b"exited"
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return pid

    def preload(self) -> None:
        """Start the preloaded process, unless it runs. For tests that look for new processes."""
        with self._lock:
            self._preload()

    def _preload(self) -> None:
        if self._control is not None:
            return
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), _PADDING],
                cwd=Path(__file__).parents[1],
                env=envs.child_environment({}, self._environment),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def close(self) -> None:
        """End the preloaded process. Forks continue to run."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.wait()


class Subprocess:
    """The module `subprocess` with another `Popen`."""

    def __init__(self, popen: Any) -> None:
        self.Popen = popen

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


FORKS = ForkingPopen()
"""For the commands of this process; its preloaded process exits with it."""


def start_programs_with(popen: Any) -> None:
    """Let the package start its programs with this object, instead of `subprocess.Popen`."""
    child_process.subprocess = child_rank.subprocess = Subprocess(popen)  # type: ignore[assignment]


# ---- the preloaded process -----------------------------------------------------------------------


def _follow(control: socket.socket) -> "dict[str, Any] | None":
    """Fork for each message until the other end is closed, and return None; in a fork, return what
    it has to run.
    """
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _MAX_BYTES, 100)
        if not message:
            return None
        if (middle := os.fork()) == 0:
            middle = os.getpid()
            if pid := os.fork():
                control.send(str(pid).encode())
                os._exit(0)
            while os.getppid() == middle:  # until the parent is the process that asked
                time.sleep(_LOOK_S)
            job: dict[str, Any] = json.loads(message)
            _take_descriptors(descriptors, job["numbers"])
            return job
        os.waitpid(middle, 0)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(b"exited")


def _take_descriptors(given: Sequence[int], numbers: Sequence[int]) -> None:
    """Give the descriptors these numbers, and close all others."""
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR) for each in given]
    for each, number in zip(moved, numbers, strict=True):
        os.dup2(each, number)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in numbers:
            with contextlib.suppress(OSError):  # the descriptor of the listing is closed already
                os.close(number)


def _run(job: dict[str, Any]) -> socket.socket | None:
    """Run the program of a fork like a new interpreter would. In a further fork, which is the
    preloaded process for what the program starts, return its socket.
    """
    module, *arguments = job["command"][2:]
    _set_command_line(job["command"])
    sys.argv, sys.orig_argv = [module, *arguments], job["command"]
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    numpy.random.seed()
    if module in _WITH_ENGINES:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return theirs
        theirs.close()
        start_programs_with(ForkingPopen(ours))
    folders = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    sys.path[:1] = [job["folder"], *folders]
    for folder in folders:
        if (first := Path(folder, "sitecustomize.py")).exists():
            exec(compile(first.read_text(), first, "exec"), {"__file__": str(first)})
    envs.get.cache_clear()
    logging.getLogger("vllm").handlers.clear()
    logger.configure.cache_clear()
    sys.modules.pop(module, None)
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    end_program(code)


def _set_command_line(words: Sequence[str]) -> None:
    """Let `ps` show these words."""
    numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(numbers[45]), int(numbers[46])
    text = b"\0".join(map(os.fsencode, words))[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def main(descriptor: int) -> None:
    """Import the modules, then run what comes through a socket, in forks."""
    control: socket.socket | None = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in _PRELOADED:
        import_module(name)
    import transformers

    assert transformers.PreTrainedTokenizerFast  # imports it
    gc.collect()
    gc.freeze()
    while control is not None and (job := _follow(control)):
        control = _run(job)
    os._exit(0)  # without the end of the interpreter, as in `_run`


if __name__ == "__main__":
    main(int(sys.argv[1]))
