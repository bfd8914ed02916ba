"""Start a server for a test, wait for it and stop it, and check that nothing of it is left."""

import contextlib
import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.forked_programs import FORKS, Fork
from tests.late_grammars import EARLY, LATE_GRAMMARS, run_first

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 300
END_TIMEOUT_S = 120
"""Time limits are for what hangs: they are far beyond what a slow machine needs."""

KEY = "secret"
"""API key of the server that is shared by the tests of clients with a key."""

_PORTS = range(20_000, 32_000)
"""Below the ports that the system gives to connections."""

_HOLD_ENGINE = """
import os, sys, time
if "vllm.engine.process.core_process" in sys.orig_argv:
    parent, go = os.getppid(), os.path.join(os.path.dirname(__file__), "go")
    while os.getppid() == parent and not os.path.exists(go):
        time.sleep(0.01)
"""


class Server:
    """A process of `vllm serve`.

    Attributes:
        process: the API process.
        port: port on which it listens.
        log: file with what it writes to stdout and stderr.
        scratch: folder for its temporary files.
    """

    def __init__(
        self, process: "subprocess.Popen[bytes] | Fork", port: int, log: Path, scratch: Path
    ) -> None:
        self.process = process
        self.port = port
        self.log = log
        self.scratch = scratch
        self._seen: dict[int, psutil.Process] = {}

    @property
    def url(self) -> str:
        """Return the URL of the server, without a path."""
        return f"http://127.0.0.1:{self.port}"

    def log_text(self) -> str:
        """Return what the server has written so far."""
        return self.log.read_text(errors="replace")

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        on_status: Callable[[], object] | None = None,
        **headers: str,
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request; return (status, headers with lower-case names, body).

        `body` is sent as JSON, and `on_status` is called when the answer begins.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_TIMEOUT_S)
        with contextlib.closing(connection):
            data = None if body is None else json.dumps(body).encode()
            if data is not None:
                headers.setdefault("Content-Type", "application/json")
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            if on_status is not None:
                on_status()
            names = {name.lower(): value for name, value in response.getheaders()}
            return response.status, names, response.read()

    def get_json(self, path: str) -> Any:
        """Return the JSON body of the answer to GET."""
        return json.loads(self.request("GET", path)[2])

    def metric(self, name: str) -> float:
        """Return the sum of the samples of a metric in GET /metrics.

        Raises:
            LookupError: the metric has no samples.
        """
        text = self.request("GET", "/metrics")[2].decode()
        values = [
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith((name + " ", name + "{"))
        ]
        if not values:
            raise LookupError(name)
        return sum(values)

    def wait_for(self, path: str = "/readyz", timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until GET of a path answers 200."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log_text()
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.request("GET", path)[0] == 200:
                    return
            time.sleep(0.02)
        raise AssertionError(f"{path} is not 200 after {timeout_s} s:\n{self.log_text()}")

    def wait_until_idle(self, timeout_s: float = 120) -> None:
        """Wait until no request runs or waits, and no request holds a block."""
        gauges = (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:gpu_cache_usage_perc",
        )
        end = time.monotonic() + timeout_s
        values: dict[str, float] = {}
        while time.monotonic() < end:
            values = {name: self.metric(name) for name in gauges}
            values["in progress"] = self.get_json("/load")["server_load"]
            if not any(values.values()):
                return
            time.sleep(0.05)
        raise AssertionError(f"not idle after {timeout_s} s: {values}")

    def replica_states(self) -> list[str]:
        """Return the state of each replica; needs VLLM_SERVER_DEV_MODE=1."""
        return [replica["state"] for replica in self.get_json("/replicas")["replicas"]]

    def children(self) -> list[psutil.Process]:
        """Return the processes of the server other than the API process, and store them for
        `assert_nothing_is_left`.
        """
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.process.pid).children(recursive=True)
            self._seen |= {child.pid: child for child in found}
            return found
        return []

    def engine_process(self) -> psutil.Process:
        """Return the process of the engine core. Its ranks may be forks of it, with the same
        command line.
        """
        (core,) = (
            each
            for each in self.children()
            if "vllm.engine.process.core_process" in each.cmdline()
            and not each.name().startswith("vllm-rank-")
        )
        return core

    def send_signal(self, signum: int = signal.SIGTERM) -> None:
        """Send a signal to the API process only."""
        self.children()
        self.process.send_signal(signum)

    def wait_for_exit(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """Wait for the server to exit, and return its exit code."""
        return self.process.wait(timeout_s)

    def remove_scratch(self) -> None:
        """Remove the folder of the sockets, which a killed server leaves."""
        for folder in self.scratch.glob("vllm-*"):
            shutil.rmtree(folder)

    def assert_nothing_is_left(self) -> None:
        """Assert that no process of the server runs any more, and that its sockets are removed."""
        assert not list(self.scratch.glob("vllm-*")), "the folder of the sockets is left behind"
        _, alive = psutil.wait_procs(self._seen.values(), timeout=60)
        assert not alive, f"left behind: {alive}\n{self.log_text()}"


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true."""
    end = time.monotonic() + START_TIMEOUT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def free_port() -> int:
    """Return a port that nobody listens on."""
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class EngineHold:
    """Lets engine processes wait in their first line until `release` is called.

    Attributes:
        variables: environment variables for a server whose engine waits.
    """

    def __init__(self, folder: Path) -> None:
        self._go = folder / "go"
        self.variables = run_first(LATE_GRAMMARS + _HOLD_ENGINE, folder)

    def release(self) -> None:
        """Let the engine processes start."""
        self._go.touch()


@contextlib.contextmanager
def start_server(
    *flags: str,
    variables: dict[str, str] | None = None,
    is_awaited: bool = True,
    compiles_early: bool = False,
    is_fork: bool = True,
) -> Iterator[Server]:
    """Run `vllm serve` with flags, and with the bundled model unless the flags name another one.

    At the end of the block, SIGTERM stops the server if it still runs. It must leave no process and
    no folder for its sockets.

    Args:
        flags: flags of `vllm serve`, without host and port.
        variables: environment variables in addition to the variables of this process.
        is_awaited: wait until it is ready.
        compiles_early: start the processes that compile grammars with the server, as users do.
            By default they start with the first grammar.
        is_fork: fork the processes of the server from one that has imported their modules. False:
            start new interpreters, as users do; it takes four seconds more of processor time.
    """
    with tempfile.TemporaryDirectory(prefix="serve-") as folder:
        log, port = Path(folder) / "log", free_port()
        scratch = Path(folder) / "tmp"
        scratch.mkdir()
        late = {EARLY: "1"} if compiles_early else run_first(LATE_GRAMMARS, Path(folder))
        environment = {**os.environ, **late, **(variables or {}), "TMPDIR": str(scratch)}
        with log.open("wb") as output:
            process = (FORKS if is_fork else subprocess.Popen)(
                [*serve_command(), "--host", "127.0.0.1", "--port", str(port), *flags],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=output,
            )
        server = Server(process, port, log, scratch)
        try:
            if is_awaited:
                server.wait_for()
                server.children()
            yield server
        finally:
            server.children()
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        server.assert_nothing_is_left()


def serve_command() -> Sequence[str]:
    """Return the command of `vllm serve` of this checkout."""
    return (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
