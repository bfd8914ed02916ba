"""Launch the process of an engine core, which imports modules until it gets its config.

The imports take longer than all work of its parent, so `vllm serve` launches the first core before
it declares its flags (`early_core`). For that reason this module imports little.
"""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

from vllm import envs
from vllm.engine.process import socket_folder
from vllm.utils.process.child_process import ChildProcess

_MODULE = "vllm.engine.process.core_process"

_CHILD_DEFAULTS = {"GOMP_SPINCOUNT": "1000", "KINETO_LOG_LEVEL": "99"}
"""Environment of the process. Waiting OpenMP threads release their core to the API process sooner;
torch's profiler does not write its own lines into the log."""

_MAX_KILL_WAIT_S = 5.0
"""A killed process ends within milliseconds, unless the kernel keeps it: in a call of a device
driver, or while it frees much memory."""


class LaunchedCore:
    """A core process, which is launched when this is constructed and waits for its config.

    Attributes:
        address: address of the socket that the process will connect to; not yet bound.
        child: the process; its config is written to its standard input.
    """

    def __init__(self) -> None:
        self.address = socket_folder.make_address()
        self.child = ChildProcess(
            [sys.executable, "-m", _MODULE, self.address, str(os.getpid())],
            envs.child_environment(_CHILD_DEFAULTS, {}),
        )

    def close(self) -> None:
        """Kill the process, wait for its end and remove its socket.

        If it does not end within seconds, a thread waits for it, so that the caller can continue.
        """
        process = self.child.process
        process.kill()
        try:
            process.wait(_MAX_KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            from vllm.logger import init_logger

            init_logger(__name__).warning(
                "the engine process %d was killed and has not exited after %.0f s: it keeps its "
                "memory and its device until the kernel lets it exit",
                *(process.pid, _MAX_KILL_WAIT_S),
            )
            threading.Thread(target=self._wait_child, name="core-reaper", daemon=True).start()
        else:
            self._wait_child()
        socket_folder.remove(self.address)

    def _wait_child(self) -> None:
        """Wait for the end of the process, then close its standard input.

        Closing it earlier is not possible: a thread may still be writing the config to it.
        """
        process = self.child.process
        process.wait()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


_early: list[LaunchedCore] = []


@contextlib.contextmanager
def early_core() -> Iterator[None]:
    """Launch a core for the first `take_core`, unless one waits already. Kill it at the end of the
    context if it was not taken.

    Raises:
        ConfigError: an environment variable has a bad value.
    """
    if not _early:
        # Report wrong variables here: the process would print the same error a second time.
        envs.get()
        _early.append(LaunchedCore())
    try:
        yield
    finally:
        end_early_core()


def end_early_core() -> None:
    """Kill the core of `early_core` if it was not taken."""
    while _early:
        _early.pop().close()


def take_core() -> LaunchedCore:
    """Return the core that `early_core` launched, or launch one now."""
    return _early.pop() if _early else LaunchedCore()
