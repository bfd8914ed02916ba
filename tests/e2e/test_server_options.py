"""Test a live server with every option of an operator: keys, JSON logs, request ids and traces."""

import gzip
import json
import mmap
import time

import pytest

from tests.e2e.operated_server import KEY, PROCESSORS, Collector, OperatedServer
from tests.e2e.server import Server

pytestmark = pytest.mark.e2e

AUTHORISED = {"Authorization": f"Bearer {KEY}"}
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
BODY = {"prompt": "import os", "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(operated_server: OperatedServer) -> Server:
    return operated_server.server


@pytest.fixture(scope="module")
def collector(operated_server: OperatedServer) -> Collector:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    return operated_server.collector


def test_the_key_of_the_environment_guards_the_model(server):
    assert server.request("POST", "/v1/completions", BODY)[0] == 401
    assert server.request("POST", "/v1/completions", BODY, **AUTHORISED)[0] == 200
    assert server.request("GET", "/health")[0] == 200


def test_a_wrong_key_is_refused_in_the_form_of_each_api(server):
    status, _, body = server.request("GET", "/v1/models", Authorization="Bearer wrong")
    assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
    message = {"model": "", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    status, _, body = server.request("POST", "/v1/messages", message, **{"x-api-key": "wrong"})
    assert (status, json.loads(body)["error"]["type"]) == (401, "authentication_error")


def test_a_request_keeps_its_id_and_is_a_span_of_the_callers_trace(server, collector):
    headers = {**AUTHORISED, "X-Request-Id": "job-77"}
    headers["traceparent"] = f"00-{TRACE_ID}-b7ad6b7169203331-01"
    status, answered, body = server.request("POST", "/v1/completions", BODY, **headers)
    assert (status, answered["x-request-id"]) == (200, "job-77")
    assert "job-77" in json.loads(body)["id"]
    words = [bytes.fromhex(TRACE_ID), b"job-77", b"gen_ai.usage.completion_tokens"]
    words.append(b"POST /v1/completions")
    end = time.monotonic() + 120
    while (lacks := [word for word in words if word not in collector.received]) and (
        time.monotonic() < end
    ):
        time.sleep(0.1)
    assert not lacks


def test_limits_are_kept(server):
    long = {**BODY, "prompt": "x" * 200_000}
    assert server.request("POST", "/v1/completions", long, **AUTHORISED)[0] == 413
    many = {**BODY, "n": 3}
    status, _, body = server.request("POST", "/v1/completions", many, **AUTHORISED)
    assert status == 400 and b"--max-n" in body


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_requests_name_their_logits_processors(server, path):
    def ask(*processors, **fields):
        body = {**BODY, **fields, "logits_processors": processors, "logprobs": 1}
        if "chat" in path:
            body |= {"messages": [{"role": "user", "content": "a"}], "logprobs": True}
        body["return_tokens_as_token_ids"] = True
        status, _, data = server.request("POST", path, body, **AUTHORISED)
        answer = json.loads(data)
        return status, answer.get("error", answer)

    def tokens(answer):
        found = answer[1]["choices"][0]["logprobs"]
        return found.get("tokens") or [entry["token"] for entry in found["content"]]

    assert tokens(ask(f"{PROCESSORS}.only_five")) == ["token_id:5"] * 4
    made = {"qualname": f"{PROCESSORS}.Only", "args": [7], "kwargs": {"after": 2}}
    assert tokens(ask(made))[2:] == ["token_id:7"] * 2 and tokens(ask(made))[0] != "token_id:7"
    assert tokens(ask(f"{PROCESSORS}.only_five", made)) == ["token_id:5"] * 2 + ["token_id:7"] * 2

    for name, told in (("failing", "my own bug"), ("leaving", "SystemExit")):
        status, answer = ask(f"{PROCESSORS}.{name}")
        assert status == 500 and told in answer["message"], answer
    refused = (
        (["os.system"], "--logits-processor-pattern"),
        ([f"{PROCESSORS}.missing"], "cannot be imported"),
        ([{"qualname": f"{PROCESSORS}.Only"}], "TypeError"),
        (["a.b"] * 17, "--max-logits-processors"),
    )
    for processors, told in refused:
        status, answer = ask(*processors)
        assert status == 400 and told in answer["message"], answer
        assert answer["param"] == "logits_processors"
    status, answer = ask(made, use_beam_search=True)
    assert status == 400 and answer["param"] in ("logprobs", "logits_processors")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/server_info", 200),
        ("POST", "/reset_prefix_cache", 200),
        ("GET", "/is_sleeping", 200),
        ("POST", "/sleep?level=3", 400),
        ("POST", "/v1/load_lora_adapter", 404),
    ],
)
def test_development_routes(server, method, path, status):
    answer = server.request(method, path, **AUTHORISED)
    assert answer[0] == status and KEY.encode() not in answer[2]


def call_workers(server, method, **arguments):
    body = {"method": method, "kwargs": arguments}
    status, _, answer = server.request("POST", "/collective_rpc", body, **AUTHORISED)
    assert status == 200, answer
    return json.loads(answer)["results"][0]


def complete(server):
    body = {**BODY, "temperature": 0, "max_tokens": 8}
    status, _, answer = server.request("POST", "/v1/completions", body, **AUTHORISED)
    return status, json.loads(answer)


def test_a_server_sleeps_gives_memory_back_and_wakes_up_as_it_was(server):
    def post(path):
        return server.request("POST", path, **AUTHORISED)[0]

    expected = complete(server)[1]["choices"][0]["text"]
    cache_bytes = call_workers(server, "fill_cache")
    assert post("/reset_prefix_cache") == 200
    awake = call_workers(server, "describe", text="x")
    assert awake["text"] == "x"
    assert post("/sleep?level=1") == 200
    asleep = call_workers(server, "describe")
    given_back = (awake["resident_pages"] - asleep["resident_pages"]) * mmap.PAGESIZE
    assert given_back > 0.9 * cache_bytes
    assert server.request("GET", "/health")[0] == 200
    status, answer = complete(server)
    assert status == 503 and "POST /wake_up" in answer["error"]["message"]
    assert post("/wake_up?tags=weights") == 200
    answer = server.request("GET", "/is_sleeping", **AUTHORISED)[2]
    assert json.loads(answer) == {"is_sleeping": True}
    assert post("/wake_up?tags=kv_cache") == 200
    assert complete(server)[1]["choices"][0]["text"] == expected


def test_a_call_to_the_workers_that_is_wrong_says_why(server):
    for method, status, word in (
        ("nothing", 400, b"no method"),
        ("get_model", 400, b"be sent"),
        ("join", 400, b"only the engine calls this method"),
    ):
        body = {"method": method}
        answer = server.request("POST", "/collective_rpc", body, **AUTHORISED)
        assert answer[0] == status and word in answer[2]


def test_a_trace_is_written_between_two_requests(server, operated_server):
    assert server.request("POST", "/stop_profile", **AUTHORISED)[0] == 400
    assert server.request("POST", "/start_profile", **AUTHORISED)[0] == 200
    assert complete(server)[0] == 200
    assert server.request("POST", "/stop_profile", **AUTHORISED)[0] == 200
    (path,) = operated_server.traces.iterdir()
    assert b'"name": "step ' in gzip.decompress(path.read_bytes())


def test_every_line_of_the_log_is_json_and_holds_no_key_and_no_whole_prompt(server):
    assert server.request("POST", "/v1/completions", BODY)[0] == 401
    assert server.request("POST", "/v1/completions", BODY, **AUTHORISED)[0] == 200
    end, lines = time.monotonic() + 120, whole_lines(server)
    while not {200, 401} <= completion_statuses(lines) and time.monotonic() < end:
        time.sleep(0.1)  # a request is logged after its answer was sent
        lines = whole_lines(server)
    assert {200, 401} <= completion_statuses(lines)
    messages = [line["message"] for line in lines]
    # Messages of the engine are in the log too.
    assert any(message.startswith("KV cache: ") for message in messages)
    assert any('"prompt": "import..."' in message for message in messages)
    assert not any(KEY in message or "import os" in message for message in messages)


def whole_lines(server):
    """Return the lines of the log, without a line that is still being written."""
    return [json.loads(line) for line in server.log_text().splitlines(True) if line.endswith("\n")]


def completion_statuses(lines):
    return {line.get("status") for line in lines if line.get("path") == "/v1/completions"}
