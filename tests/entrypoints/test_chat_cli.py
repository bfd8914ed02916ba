"""Test `vllm chat` and `vllm complete` against a server that sends the answers of the test."""

import io
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.e2e.server import free_port
from vllm.entrypoints.cli import api_client
from vllm.entrypoints.cli.main import main


class Playback(ThreadingHTTPServer):
    """Answers /v1/models, and everything else with the given events; records the requests."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked = []
        self.keys = []
        self.events = []
        self.refusal = None
        self.prefix = "/v1/"
        self.models = [{"id": "first"}, {"id": "second"}]

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if not self.path.startswith(self.server.prefix):
            self.answer(404, b'{"error": {"message": "Not Found"}}')
            return
        self.answer(200, json.dumps({"data": self.server.models}).encode())

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, json.loads(body)))
        self.server.keys.append(self.headers["Authorization"])
        if self.server.refusal is not None:
            self.answer(400, json.dumps(self.server.refusal).encode())
            return
        self.answer(200, b"".join(b"data: " + event + b"\n\n" for event in self.server.events))

    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """Print nothing."""


@pytest.fixture
def server():
    with Playback() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def chat_event(text):
    return json.dumps({"choices": [{"delta": {"content": text}}]}).encode()


ROLE = json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]}).encode()
USAGE = json.dumps({"choices": [], "usage": {"total_tokens": 3}}).encode()
ANSWER = [ROLE, chat_event("Hel"), chat_event("lo"), USAGE, b"[DONE]"]


def run(capsys, monkeypatch, *argv, typed=""):
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("more", ["", "/"])
def test_a_url_without_v1_is_tried_with_it(server, capsys, monkeypatch, more):
    server.events = ANSWER
    url = server.url.removesuffix("/v1") + more
    assert run(capsys, monkeypatch, "chat", "--url", url, "-q", "Hi") == (0, "Hello\n", "")
    assert [path for path, _ in server.asked] == ["/v1/chat/completions"]


def test_a_server_without_these_routes_is_told_with_a_hint(server, capsys, monkeypatch):
    server.prefix = "/elsewhere/"
    url = server.url.removesuffix("/v1")
    code, out, err = run(capsys, monkeypatch, "chat", "--url", url, "-q", "Hi")
    assert (code, out) == (2, "")
    assert err == "error: the server answered 404: Not Found. Does --url end in /v1?\n"


def test_one_message_is_answered_in_full(server, capsys, monkeypatch):
    server.events = ANSWER
    flags = ("--url", server.url, "--system-prompt", "Be brief.", "-q", "Hi", "--max-tokens", "9")
    assert run(capsys, monkeypatch, "chat", *flags) == (0, "Hello\n", "")
    ((path, body),) = server.asked
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "first",
        "max_tokens": 9,
        "stream": True,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ],
    }


def test_a_conversation_keeps_its_history(server, capsys, monkeypatch):
    server.events = ANSWER
    code, out, _ = run(
        capsys, monkeypatch, "chat", "--url", server.url, "--model-name", "m", typed="a\n\nb\n"
    )
    assert (code, out) == (0, "Hello\nHello\n")
    roles = [message["role"] for message in server.asked[1][1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert server.asked[0][1]["model"] == "m"


def test_a_completion_is_shown(server, capsys, monkeypatch):
    server.events = [json.dumps({"choices": [{"text": t}]}).encode() for t in ("x", "y")]
    flags = ("--url", server.url + "/", "-q", "def", "--api-key", "sesame")
    assert run(capsys, monkeypatch, "complete", *flags) == (0, "xy\n", "")
    assert server.asked[0] == (
        "/v1/completions",
        {"model": "first", "prompt": "def", "stream": True},
    )
    assert server.keys == ["Bearer sesame"]


FLAT = {"object": "error", "message": "too long", "code": 400}
NESTED = {"error": {"message": "too long"}}


@pytest.mark.parametrize("refusal", [FLAT, NESTED])
def test_a_refusal_is_one_line(server, capsys, monkeypatch, refusal):
    server.refusal = refusal
    code, _, err = run(capsys, monkeypatch, "chat", "--url", server.url, "-q", "Hi")
    assert (code, err) == (2, "error: the server answered 400: too long\n")


@pytest.mark.parametrize("refusal", [FLAT, NESTED])
def test_an_error_in_the_middle_ends_the_answer(server, capsys, monkeypatch, refusal):
    server.events = [chat_event("Hel"), json.dumps(refusal).encode()]
    result = run(capsys, monkeypatch, "chat", "--url", server.url, "-q", "Hi")
    assert result == (2, "Hel\n", "error: too long\n")


@pytest.mark.parametrize("event", [b"{", b"[]", b"3"])
def test_nonsense_of_a_server_is_an_error(server, capsys, monkeypatch, event):
    server.events = [event]
    code, _, err = run(capsys, monkeypatch, "chat", "--url", server.url, "-q", "Hi")
    assert code == 2 and err.startswith("error: the server sent an event that is not")


def test_a_conversation_goes_on_without_a_message_that_failed(server, capsys, monkeypatch):
    server.refusal = FLAT
    code, _, err = run(capsys, monkeypatch, "chat", "--url", server.url, typed="a\nb\n")
    assert code == 0 and err.count("too long") == 2
    assert [len(body["messages"]) for _, body in server.asked] == [1, 1]


def test_ctrl_c_keeps_what_has_come(monkeypatch, capsys):
    closed = []

    def chunks():
        try:
            yield {"choices": [{"delta": {"content": "Hel"}}]}
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    assert api_client.write_answer(chunks()) == "Hel"
    assert capsys.readouterr().out == "Hel [stopped]\n" and closed == [True]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:PORT/v1", "cannot reach http://127.0.0.1"),
        ("localhost:8000", "must be like http://localhost:8000/v1"),
        ("ftp://a/v1", "must be like"),
        ("http://a:b/v1", "must be like"),
    ],
)
def test_a_server_that_is_not_there_is_one_line(capsys, monkeypatch, url, message):
    url = url.replace("PORT", str(free_port()))
    code, out, err = run(capsys, monkeypatch, "chat", "--url", url, "-q", "Hi")
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


def test_a_server_without_models_needs_a_name(server, capsys, monkeypatch):
    server.models = []
    code, _, err = run(capsys, monkeypatch, "complete", "--url", server.url, "-q", "Hi")
    assert code == 2 and "--model-name" in err
