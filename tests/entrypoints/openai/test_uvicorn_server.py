"""Test the server process from start to end, with an engine that the test controls."""

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time

import pytest
import uvicorn

from tests.entrypoints.openai.server_fakes import ControlledEngine, make_app
from vllm.entrypoints.server import tls, uvicorn_server
from vllm.entrypoints.server.tls import check_certificates, refresh_certificate
from vllm.entrypoints.server.uvicorn_server import bind, serve
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.errors import ConfigError, EngineDeadError, EngineStoppedError

LOCAL = {"host": "127.0.0.1", "port": 0}


class CommandedEngine(ControlledEngine):
    """Starts and fails when the test says so."""

    def __init__(self, start_error=None):
        super().__init__(is_ready=False)
        self.is_shut_down = False
        self._start_error = start_error

    async def start(self):
        self._loop = asyncio.get_running_loop()
        if self._start_error is not None:
            self.startup.set_failed(self._start_error)
            raise self._start_error
        self.startup.set_ready()

    def on_death(self, callback):
        self.callback = callback

    def die(self, error):
        self.startup.set_failed(error)
        self._loop.call_soon_threadsafe(self.callback, error)

    def shutdown(self):
        self.is_shut_down = True
        self.startup.set_failed(EngineDeadError("the engine was shut down"))


class Life:
    """One run of the server in this thread; `act(self)` runs at the same time in another thread."""

    def __init__(self, act, engine=None, **settings):
        self.engine = engine or CommandedEngine()
        self.args = ServerArgs(**LOCAL, **settings)
        self.errors = []
        self.may_end = threading.Event()
        """Requests to /slow run until this is set."""
        self._act = act

    def run(self):
        """Return the exit code. Raises what `serve` or `act` raises."""
        with bind(self.args) as listener:
            self.port = listener.getsockname()[1]
            thread = threading.Thread(target=self._run_act)
            thread.start()
            try:
                return serve(self.load, self.args, listener)
            finally:
                thread.join()
                assert not self.errors, self.errors

    def load(self):
        app, context = make_app()
        context.engine = self.engine
        context.args = self.args

        @app.get("/slow")
        async def slow():
            while not self.may_end.is_set():
                await asyncio.sleep(0.01)
            return {}

        @app.get("/running")
        async def running():
            while not self.engine.is_shut_down:
                await asyncio.sleep(0.01)
            raise EngineStoppedError("stopped")

        self.loop_engine = context.engine
        return context, app

    def _run_act(self):
        try:
            self._act(self)
        except BaseException as error:
            self.errors.append(error)
            self.send(signal.SIGTERM)
            self.send(signal.SIGTERM)

    def get(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def wait_ready(self):
        while self.get("/readyz")[0] != 200:
            time.sleep(0.01)

    def wait_closing(self):
        while self.get("/readyz")[0] == 200:
            time.sleep(0.01)

    def send(self, signum):
        os.kill(os.getpid(), signum)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_end_and_the_exit_code_is_0(signum):
    answers = []

    def act(life):
        life.wait_ready()
        slow = threading.Thread(target=lambda: answers.append(life.get("/slow")))
        slow.start()
        while json.loads(life.get("/load")[1])["server_load"] == 0:
            time.sleep(0.01)
        life.send(signum)
        life.wait_closing()
        answers.append(life.get("/echo"))
        life.may_end.set()
        slow.join()

    life = Life(act)
    assert life.run() == 0
    assert [status for status, _ in answers] == [503, 200]
    assert life.engine.is_shut_down


def test_a_second_signal_ends_with_its_own_exit_code():
    def act(life):
        life.wait_ready()
        threading.Thread(target=leave_it, args=(life,), daemon=True).start()
        while json.loads(life.get("/load")[1])["server_load"] == 0:
            time.sleep(0.01)
        life.send(signal.SIGTERM)
        life.wait_closing()
        life.send(signal.SIGTERM)

    def leave_it(life):
        with contextlib.suppress(OSError):  # the server cuts this connection
            life.get("/slow")

    assert Life(act).run() == 128 + signal.SIGTERM


def test_a_second_signal_leaves_time_for_the_errors_of_running_requests():
    answers = []

    def act(life):
        life.wait_ready()
        running = threading.Thread(target=lambda: answers.append(life.get("/running")))
        running.start()
        while json.loads(life.get("/load")[1])["server_load"] == 0:
            time.sleep(0.01)
        life.send(signal.SIGTERM)
        life.wait_closing()
        life.send(signal.SIGTERM)
        running.join()

    assert Life(act).run() == 128 + signal.SIGTERM
    ((status, body),) = answers
    assert (status, json.loads(body)["error"]["message"]) == (503, "stopped")


def test_an_engine_that_dies_ends_the_server_with_its_error():
    def act(life):
        life.wait_ready()
        life.loop_engine.die(EngineDeadError("the engine process has ended (signal 9)"))
        assert life.get("/health")[0] == 503

    with pytest.raises(EngineDeadError, match="signal 9"):
        Life(act).run()


@pytest.mark.parametrize("error", [ConfigError("no such model"), EngineDeadError("gone")])
def test_an_engine_that_cannot_start_ends_the_server_with_its_error(error):
    engine = CommandedEngine(start_error=error)
    with pytest.raises(type(error), match=str(error)):
        Life(lambda life: None, engine).run()
    assert engine.is_shut_down


def test_an_application_that_cannot_be_made_ends_the_server_with_its_error(monkeypatch):
    def fail(life):
        raise ConfigError("middleware 'x' cannot be imported")

    monkeypatch.setattr(Life, "load", fail)
    with pytest.raises(ConfigError, match="middleware"):
        Life(lambda life: None).run()


def test_a_socket_file_is_there_while_the_server_is(tmp_path):
    path = str(tmp_path / "socket")
    with bind(ServerArgs(uds=path)):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
        with pytest.raises(ConfigError, match="another server"), bind(ServerArgs(uds=path)):
            pass
    assert not os.path.exists(path)


def test_a_socket_file_of_a_server_that_was_killed_is_replaced(tmp_path):
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(path)
    with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
    with bind(ServerArgs(uds=path)), socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        assert client.getpeername() == path


def test_another_file_is_not_taken_for_a_socket(tmp_path):
    path = tmp_path / "data"
    path.write_text("kept")
    with (
        pytest.raises(ConfigError, match="Address already in use"),
        bind(ServerArgs(uds=str(path))),
    ):
        pass
    assert path.read_text() == "kept"


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_an_error(host):
    with pytest.raises(ConfigError, match=f"cannot listen on {host}"), bind(ServerArgs(host=host)):
        pass


@pytest.fixture
def make_certificate(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")

    def make(name):
        """Write key and certificate for `name`; return their paths."""
        key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"),
                *("-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", f"/CN={name}"),
                *("-keyout", key, "-out", certificate),
            ],
            check=True,
            capture_output=True,
        )
        return str(key), str(certificate)

    return make


def common_name(port):
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port), timeout=120) as plain,
        context.wrap_socket(plain) as connection,
    ):
        data = connection.getpeercert(binary_form=True)
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    return "second" if b"second" in data else "first"


def test_a_certificate_needs_its_own_key(make_certificate, tmp_path):
    key, _ = make_certificate("first")
    other = shutil.copy(key, tmp_path / "other.pem")
    key, certificate = make_certificate("second")
    check_certificates(ServerArgs(ssl_certfile=certificate, ssl_keyfile=key))
    for wrong, reason in ((str(other), "key values mismatch"), (None, "it is not")):
        with pytest.raises(ConfigError, match=f"cannot be used: {reason}.* its own private key"):
            check_certificates(ServerArgs(ssl_certfile=certificate, ssl_keyfile=wrong))


def test_a_certificate_that_changes_is_loaded_again(make_certificate, monkeypatch):
    monkeypatch.setattr(uvicorn_server, "CERTIFICATE_CHECK_S", 0.05)
    key, certificate = make_certificate("first")
    seen = []

    def act(life):
        seen.append(common_name(life.port))
        make_certificate("second")
        end = time.monotonic() + 120
        while common_name(life.port) != "second" and time.monotonic() < end:
            time.sleep(0.05)
        seen.append(common_name(life.port))
        life.send(signal.SIGTERM)

    tls = {"ssl_keyfile": key, "ssl_certfile": certificate, "enable_ssl_refresh": True}
    assert Life(act, **tls).run() == 0
    assert seen == ["first", "second"]


def test_a_certificate_that_cannot_be_loaded_leaves_the_old_one(make_certificate, monkeypatch):
    key, certificate = make_certificate("first")
    config = uvicorn.Config(None, ssl_keyfile=key, ssl_certfile=certificate, log_config=None)
    config.load()

    async def test():
        is_refused = asyncio.Event()
        monkeypatch.setattr(tls.logger, "warning", lambda *args: is_refused.set())
        task = asyncio.create_task(refresh_certificate(config, 0.001))
        await asyncio.sleep(0)  # the server has read the old files before they change
        with open(certificate, "w") as file:
            file.write("nonsense")
        await asyncio.wait_for(is_refused.wait(), 120)
        assert not task.done()
        task.cancel()

    asyncio.run(test())


def test_a_certificate_that_is_missing_is_an_error():
    args = ServerArgs(**LOCAL, ssl_certfile="/no/cert")
    with bind(args) as listener, pytest.raises(ConfigError, match="TLS"):
        serve(lambda: None, args, listener)


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        ({}, "http://localhost:"),
        ({"host": "127.0.0.1"}, "http://127.0.0.1:"),
        ({"ssl_certfile": "c", "host": "localhost"}, "https://127.0.0.1:"),
        ({"disable_web_ui": True}, None),
    ],
)
def test_the_log_says_where_to_chat(settings, address, monkeypatch):
    lines = []
    monkeypatch.setattr(uvicorn_server.logger, "info", lambda text, *a: lines.append(text % a))
    args = ServerArgs(port=0, **settings)
    with bind(args) as listener:
        port = listener.getsockname()[1]
        uvicorn_server.log_address(listener, args)
    expected = [] if address is None else [f"chat page: {address}{port}/"]
    assert [line for line in lines if line.startswith("chat page")] == expected
