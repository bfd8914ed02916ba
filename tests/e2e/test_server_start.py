"""Test how a live server starts, reports its state, and ends."""

import json
import re
import signal
import socket
import subprocess
import threading
import time

import pytest

from tests.e2e.server import ROOT, EngineHold, free_port, serve_command, start_server

pytestmark = pytest.mark.e2e

PROMPT = {"prompt": "def main(", "max_tokens": 8, "temperature": 0}
LONG = {"prompt": "import", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


class Background(threading.Thread):
    """A request whose answer is read later."""

    def __init__(self, server, body):
        super().__init__(daemon=True)
        self.answer = None
        self.has_begun = threading.Event()
        self._server, self._body = server, body
        self.start()

    def run(self):
        try:
            self.answer = self._server.request(
                "POST", "/v1/completions", self._body, on_status=self.has_begun.set
            )
        except OSError as error:
            self.answer = error

    def result(self):
        self.join(300)
        assert not isinstance(self.answer, OSError), self.answer
        status, headers, body = self.answer
        return status, headers, body.decode()


@pytest.fixture
def engine_hold(tmp_path):
    """Hold the start of engines until it is released."""
    return EngineHold(tmp_path)


@pytest.mark.parametrize(
    "signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive)]
)
def test_early_requests_wait_for_the_engine_and_a_signal_lets_running_ones_end(engine_hold, signum):
    """One server is used from start to end, because each start costs seconds of processor time."""
    variables = engine_hold.variables
    with start_server(
        "--shutdown-timeout", "300", is_awaited=False, variables=variables, is_fork=False
    ) as server:
        server.wait_for("/livez")
        status, _, body = server.request("GET", "/readyz")
        assert status == 503 and json.loads(body)["status"] == "starting"
        assert server.request("GET", "/health")[0] == 503
        early = Background(server, PROMPT)
        wait_until(server, lambda: server.get_json("/load")["server_load"] == 1)
        engine_hold.release()
        assert early.result()[0] == 200
        assert server.get_json("/startupz")["status"] == "ready"
        messages = [line.partition("] ")[2] for line in server.log_text().splitlines()]
        steps = [text for text in messages if text.startswith(("start: ", "ready in ", "Started"))]
        assert steps[0].startswith("Started server process")
        assert steps[1] == "start: importing PyTorch and the engine"
        assert re.fullmatch(
            r"ready in [\d.]+ s: stdlib-llama-5m, max_model_len 2048, .*", steps[-1]
        )

        running = [Background(server, {**LONG, "max_tokens": 400})]
        wait_for_running(server, 1)
        core = server.engine_process()
        core.suspend()  # no request may end before all requests are sent
        running += [Background(server, {**LONG, "max_tokens": 100}) for _ in range(16)]
        wait_until(server, lambda: server.get_json("/load")["server_load"] == len(running))
        server.send_signal(signum)
        wait_until_it_ends(server)
        status, headers, _ = server.request("POST", "/v1/completions", PROMPT)
        assert (status, headers["connection"]) == (503, "close")
        core.resume()
        for status, _, body in (each.result() for each in running):
            assert status == 200 and json.loads(body)["usage"]["completion_tokens"] in (100, 400)
        assert server.wait_for_exit() == 0


# Exhaustive: tests/entrypoints/openai/test_gate.py tests this with a fake engine.
@pytest.mark.exhaustive
def test_early_requests_may_be_rejected(engine_hold):
    flags = ("--early-requests", "reject")
    with start_server(*flags, is_awaited=False, variables=engine_hold.variables) as server:
        server.wait_for("/livez")
        status, headers, _ = server.request("POST", "/v1/completions", PROMPT)
        assert status == 503 and int(headers["retry-after"]) >= 1


def test_requests_that_do_not_end_in_time_are_told():
    with start_server("--shutdown-timeout", "0") as server:
        plain = Background(server, LONG)
        stream = Background(server, {**LONG, "stream": True})
        wait_for_running(server, 2)
        # before its first token, a streamed request would also be answered with an error status
        assert stream.has_begun.wait(300)
        server.send_signal()
        assert server.wait_for_exit() == 0
        status, _, body = plain.result()
        assert status == 503 and "the server was stopped" in body
        status, _, body = stream.result()
        assert status == 200 and body.endswith("data: [DONE]\n\n")
        assert "the server was stopped" in body.split("\n\n")[-3]


# Exhaustive: tests/entrypoints/openai/test_uvicorn_server.py tests this with a fake engine.
@pytest.mark.exhaustive
def test_a_second_signal_ends_at_once():
    with start_server() as server:
        Background(server, LONG)
        wait_for_running(server, 1)
        # While the engine is suspended, the request cannot end by itself.
        server.engine_process().suspend()
        server.send_signal()
        wait_until_it_ends(server)
        assert server.process.poll() is None
        server.send_signal()
        assert server.wait_for_exit() == 128 + signal.SIGTERM


def test_a_signal_while_the_engine_starts_ends_it(engine_hold):
    with start_server(is_awaited=False, variables=engine_hold.variables) as server:
        server.wait_for("/livez")
        early = Background(server, PROMPT)
        wait_until(server, lambda: server.get_json("/load")["server_load"] == 1)
        server.send_signal()
        assert server.wait_for_exit() == 0
        status, _, body = early.result()
        assert status == 503 and "shutting down" in body


def wait_for_running(server, number):
    wait_until(server, lambda: server.metric("vllm:num_requests_running") >= number)


def wait_until_it_ends(server):
    """Wait until the server has received the signal to end."""
    wait_until(server, lambda: server.request("GET", "/readyz")[0] == 503)


def wait_until(server, condition):
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end, server.log_text()
        time.sleep(0.02)


def run_to_end(*flags):
    return subprocess.run(
        [*serve_command(), *flags], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def test_what_cannot_start_is_one_line_and_exit_code_2():
    """test_start_checks.py and test_cli_messages.py test other mistakes."""
    flags = ("--max-model-len", "999999999")
    result = run_to_end("--host", "127.0.0.1", "--port", str(free_port()), *flags)
    assert result.returncode == 2
    error = result.stderr.splitlines()[0]
    assert error.startswith("error: ") and "--max-model-len 999999999: " in error, result.stderr
    assert "Traceback" not in result.stderr and "listening" not in result.stderr


def test_a_port_in_use_is_an_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run_to_end("--host", "127.0.0.1", "--port", str(port))
    assert result.returncode == 2
    assert f"port {port}: Address already in use. Choose another --port" in result.stderr
