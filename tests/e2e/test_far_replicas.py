"""Test replicas of a server that another machine runs; here it is another process of this
machine.
"""

import contextlib
import os
import signal
import socket
import sys
import threading

import psutil
import pytest

from tests.e2e.server import START_TIMEOUT_S, free_port, start_server, wait_until
from tests.exhaustive import exhaustive
from tests.forked_programs import FORKS

pytestmark = pytest.mark.e2e

FLAGS = ("--max-model-len", "256", "--max-num-seqs", "8", "--data-parallel-size", "2")


@contextlib.contextmanager
def machine(port: int, *flags: str, log):
    """Start a process, in the role of a machine, with the second replica."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--headless"]
    command += [*FLAGS, "--data-parallel-size-local", "1", "--data-parallel-start-rank", "1"]
    command += ["--data-parallel-rpc-port", str(port), *flags]
    with log.open("ab") as output:
        process = FORKS(command, stdout=output, stderr=output)
        try:
            yield process
        finally:
            children = psutil.Process(process.pid).children() if process.poll() is None else []
            process.terminate()
            assert process.wait(60) == 0 or process.returncode == -signal.SIGKILL
            _, alive = psutil.wait_procs(children, 30)
            assert not alive


def complete(server, **more):
    body = {"prompt": "import os\n", "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}
    return server.request("POST", "/v1/completions", body)


@pytest.mark.parametrize("loses_core", [False, exhaustive(True)])
def test_a_server_has_replicas_on_another_machine_which_may_be_lost_and_return(
    loses_core, tmp_path
):
    port, log = free_port(), tmp_path / "machine.log"
    flags = ("--data-parallel-size-local", "1", "--data-parallel-rpc-port", str(port))
    with start_server(
        *FLAGS,
        *flags,
        "--restart-engine",
        "3",
        variables={"VLLM_SERVER_DEV_MODE": "1"},
        is_awaited=False,
    ) as server:
        wait_until(lambda: "waiting for the machines of" in server.log_text())
        # Bytes that are not a message of a replica do no harm.
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 9, b"\xff" * 64):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(noise)
        with machine(port, log=log) as far:
            server.wait_for()
            answers = []
            threads = [
                threading.Thread(target=lambda: answers.append(complete(server, max_tokens=100)))
                for _ in range(6)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert [status for status, _, _ in answers] == [200] * 6
            assert len({body.split(b'"text":')[1].split(b",")[0] for _, _, body in answers}) == 1
            (core,) = (
                each
                for each in psutil.Process(far.pid).children()
                if "vllm.engine.process.core_process" in each.cmdline()
            )
            assert core.cpu_times().user > 0
            # Exhaustive: tests/engine/test_core_replicas.py starts a lost core again.
            if loses_core:
                # The engine core on the other machine ends: that machine starts it again.
                os.kill(core.pid, signal.SIGKILL)
                wait_until(lambda: server.replica_states()[1] != "ready")
                assert complete(server)[0] == 200
                wait_until(lambda: server.replica_states() == ["ready", "ready"])
            # The other machine ends: the remaining replicas continue to serve.
            far.kill()
        wait_until(lambda: server.replica_states()[1] != "ready")
        assert complete(server)[0] == 200
        with machine(port, log=log):
            wait_until(lambda: server.replica_states() == ["ready", "ready"])
            assert complete(server)[0] == 200
        assert "Traceback" not in server.log_text() and "Traceback" not in log.read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--headless"], "--headless needs "),
        (["-dp", "2", "--data-parallel-start-rank", "1", "--data-parallel-size-local", "1"],
         "--data-parallel-start-rank 1 is only possible with --headless"),
        (["-dp", "2", "--data-parallel-size-local", "3"], "size-local must be from 0 to "),
        (["-dp", "2", "--headless", "--data-parallel-size-local", "1",
          "--data-parallel-start-rank", "2"], "--data-parallel-start-rank must be from 0 to 1"),
        (["-dp", "2", "--data-parallel-size-local", "1", "--data-parallel-rpc-port", "0"],
         "--data-parallel-rpc-port must be from 1 to 65535"),
    ],
)  # fmt: skip
def test_flags_that_contradict_each_other_are_refused_in_one_line(flags, message, capsys):
    from vllm.entrypoints.openai.api_server import main

    assert main(flags) != 0
    text = capsys.readouterr().err
    assert message in text and "Traceback" not in text


def test_a_machine_with_other_flags_is_refused(tmp_path):
    port, log = free_port(), tmp_path / "machine.log"
    flags = ("--data-parallel-size-local", "1", "--data-parallel-rpc-port", str(port))
    with (
        machine(port, "--max-model-len", "128", log=log),
        start_server(*FLAGS, *flags, is_awaited=False) as server,
    ):
        assert server.process.wait(START_TIMEOUT_S) != 0
        wanted = "differs from the server: --max-model-len is 128 on this machine and 256"
        assert wanted in server.log_text()
        assert wanted.replace("--max-model-len", "max_model_len") in log.read_text()
