"""Test POST /v1/messages and count_tokens, with an engine that generates the text of the test."""

import asyncio
import json

import pytest

from tests.entrypoints.openai.anthropic_client import accumulate
from tests.entrypoints.openai.scripted_engine import (
    ODD_VALUES,
    ScriptedEngine,
    make_app,
    make_client,
    open_stream,
)
from tests.fake_core import running
from tests.loops import loop_over
from vllm.entrypoints.anthropic.protocol import MessagesRequest
from vllm.errors import CapacityError, EngineDeadError, RequestTimeoutError

PATH = "/v1/messages"
SOURCE = {"type": "url", "url": "http://pictures.example/a.png"}
TOOL = {"name": "add", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "hi"}

HERMES = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
CALLS = [
    "I add.",
    '<tool_call>{"name": "add", "arguments": {"a"',
    ": 1}}</tool_call>",
    '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
]


def post(client, path=PATH, **fields):
    return client.post(path, json={"messages": [USER], "max_tokens": 9, **fields})


def read_events(response):
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def accumulated(events):
    """Return the message that the official client builds from a stream, as JSON."""
    return accumulate(events).to_dict(exclude_unset=True)


def without_ids(message):
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


@pytest.mark.parametrize(
    ("pieces", "settings", "fields", "stop"),
    [
        (["Hel", "", "lo"], {}, {}, "end_turn"),
        ([], {}, {}, "end_turn"),
        (["<think>so", " so</think>", "yes"], {"reasoning_parser": "deepseek_r1"}, {}, "end_turn"),
        (CALLS, HERMES, {"tools": [TOOL]}, "tool_use"),
        (
            ['[{"name": "add", "parameters": {"a"', ": 1}}]"],
            {},
            {"tools": [TOOL], "tool_choice": {"type": "any"}},
            "tool_use",
        ),
        (
            ['{"a": ', "1}"],
            {},
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "add"}},
            "tool_use",
        ),
    ],
    ids=["text", "nothing", "reasoning", "auto", "any", "named"],
)
def test_the_streamed_message_is_the_unstreamed_one(pieces, settings, fields, stop):
    client = make_client(ScriptedEngine(*pieces), **settings)
    whole = post(client, **fields)
    assert whole.status_code == 200
    assert whole.json()["stop_reason"] == stop
    events = read_events(post(client, **fields, stream=True))
    streamed = without_ids(accumulated(events))
    wanted = without_ids(whole.json())
    assert {name: streamed[name] for name in wanted} == wanted
    assert wanted["usage"]["output_tokens"] == len(pieces) + 1


def test_blocks_are_what_the_parsers_found():
    client = make_client(ScriptedEngine("<think>so</think>", "yes"), reasoning_parser="deepseek_r1")
    assert [(b["type"], b[b["type"]]) for b in post(client).json()["content"]] == [
        ("thinking", "so"),
        ("text", "yes"),
    ]
    client = make_client(ScriptedEngine('[{"name": "add", "parameters": {"a": 1}}]'))
    (block,) = post(client, tools=[TOOL], tool_choice={"type": "any"}).json()["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "add", {"a": 1})


def test_a_stop_sequence_is_named():
    engine = ScriptedEngine("a", "END")
    message = post(make_client(engine), stop_sequences=["END"]).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    assert [params.stop for _, params in engine.requests.values()] == [["END"]]


def test_the_last_turn_of_the_assistant_is_continued():
    engine = ScriptedEngine("yes")
    messages = [USER, {"role": "assistant", "content": "I say"}]
    assert post(make_client(engine), messages=messages).status_code == 200
    assert [prompt for prompt, _ in engine.requests.values()] == ["<user>hi<assistant>I say"]


@pytest.mark.parametrize("fields", [{}, {"system": "be brief"}, {"tools": [TOOL]}])
def test_counted_tokens_are_those_of_the_usage(fields):
    client = make_client(
        ScriptedEngine("a"), enable_auto_tool_choice=True, tool_call_parser="hermes"
    )
    counted = client.post(f"{PATH}/count_tokens", json={"messages": [USER], **fields}).json()
    usage = post(client, **fields).json()["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


CLAUDE_CODE = {
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=fa690;"},
        {"type": "text", "text": "S", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "T", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]},
        {"role": "system", "content": "R"},
        {"role": "user", "content": "b"},
    ],
    "tools": [{**TOOL, "cache_control": None}, {"type": "bash_20250124", "name": "bash"}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "adaptive", "display": "omitted"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "u" * 1000},
}


def test_a_request_of_claude_code_is_served_and_counted():
    engine = ScriptedEngine("yes")
    client = make_client(engine, **HERMES)
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,x"}
    body = {**CLAUDE_CODE, "max_tokens": 5}
    answer = client.post(f"{PATH}?beta=true", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    ((prompt, _),) = engine.requests.values()
    assert prompt == "<system>S<user>a<assistant>[add]<tool><system>R<user>b<assistant>"
    usage = answer.json()["usage"]
    num_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
    counted = client.post(f"{PATH}/count_tokens?beta=true", json=CLAUDE_CODE, headers=headers)
    assert counted.json() == {"input_tokens": num_tokens}


@pytest.mark.parametrize("arguments", ['{"a": "He said "hi" and"}', '{"a": 1'])
def test_a_damaged_call_is_the_same_in_a_stream(arguments):
    pieces = ["<tool_call>{", f'"name": "add", "arguments": {arguments}', "}</tool_call>"]
    client = make_client(ScriptedEngine(*pieces), **HERMES)
    whole = post(client, tools=[TOOL]).json()
    (block,) = [block for block in whole["content"] if block["type"] == "tool_use"]
    assert block["input"] != {}
    streamed = accumulated(read_events(post(client, tools=[TOOL], stream=True)))
    assert without_ids(streamed)["content"] == without_ids(whole)["content"]


# ---- errors -------------------------------------------------------------------------------


@loop_over(
    "fields, kind, text",
    [
        ({"model": "other"}, "not_found_error", "`other` does not exist"),
        ({"max_tokens": None}, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 10**9}, "invalid_request_error", "context length"),
        ({"max_tokens": 10**30}, "invalid_request_error", "max_tokens"),
        ({"messages": []}, "invalid_request_error", "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "invalid_request_error", "role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}]},
            "invalid_request_error",
            'must have the type "text", as this model reads text only; got "image"',
        ),
        ({"temperature": 3}, "invalid_request_error", "temperature"),
        ({"top_k": 2**40}, "invalid_request_error", "top_k"),
        ({"tools": [TOOL]}, "invalid_request_error", "--tool-call-parser"),
        ({"tool_choice": {"type": "any"}}, "invalid_request_error", "tool_choice"),
        ({"system": 7}, "invalid_request_error", "system"),
    ],
)
@loop_over("stream", [False, True])
def test_a_bad_request_is_refused_in_the_form_of_the_api(fields, kind, text, stream):
    engine = ScriptedEngine("yes")
    answer = post(make_client(engine), **fields, stream=stream)
    assert answer.status_code == (404 if kind == "not_found_error" else 400)
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert text in body["error"]["message"]
    assert not engine.requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (CapacityError("full", status=503), 503, "overloaded_error"),
        (RequestTimeoutError("slow"), 504, "timeout_error"),
        (EngineDeadError("dead"), 500, "api_error"),
        (KeyError("secret"), 500, "api_error"),
    ],
)
def test_an_early_error_of_the_engine_has_its_status(error, status, kind, stream):
    engine = ScriptedEngine("yes")
    engine.error = error
    answer = post(make_client(engine), stream=stream)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert "secret" not in answer.text
    assert ("retry-after" in answer.headers) == (status == 503)


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}]
)
def test_a_thread_is_refused_as_clients_expect_that_then_send_all_messages(path, thread):
    answer = post(make_client(ScriptedEngine("x")), path, thread=thread)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert error["details"] == details


def test_an_error_in_between_is_the_last_event():
    engine = ScriptedEngine("a", "b")
    engine.error, engine.error_at = EngineDeadError("the core died"), 1
    events = read_events(post(make_client(engine), stream=True))
    assert events[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "the core died", "code": "engine_dead"},
    }


def test_errors_before_the_route_have_the_form_of_the_api():
    client = make_client(ScriptedEngine(), api_key=("one",), max_request_bytes=100)
    refused = post(client)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    large = client.post(PATH, content=b" " * 200, headers={"x-api-key": "one"})
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
    broken = client.post(
        PATH, content=b"{", headers={"x-api-key": "one", "content-type": "application/json"}
    )
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(stream):
    engine = ScriptedEngine("a", "b")
    engine.hold()

    async def run():
        body = json.dumps({"messages": [USER], "max_tokens": 9, "stream": stream}).encode()
        async with running(engine):
            async with open_stream(make_app(engine), PATH, body) as opened:
                if stream:
                    await opened.read_until(b"content_block_delta")
                while not engine.core.running:
                    await asyncio.sleep(0)
            await engine.settle()
        assert engine.aborted == list(engine.requests)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/completions", {"prompt": ["hi", "you"]}),
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/responses", {"input": "hi"}),
        (PATH, {"messages": [USER], "max_tokens": 9}),
    ],
)
def test_the_key_in_the_engine_is_its_own_although_ids_of_clients_repeat(path, body):
    engine = ScriptedEngine("a")
    client = make_client(engine)
    for _ in range(2):
        answer = client.post(path, json=body, headers={"X-Request-Id": "same"})
        assert answer.status_code == 200
    num_prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    assert len(engine.requests) == 2 * num_prompts
    assert all("same" in request_id for request_id in engine.requests)


# ---- fuzz ---------------------------------------------------------------------------------


@pytest.mark.parametrize("field", sorted(MessagesRequest.model_fields))
def test_any_value_of_a_field_is_taken_or_refused(field):
    client = make_client(ScriptedEngine("a"))
    for value in ODD_VALUES:
        body = json.dumps({"messages": [USER], "max_tokens": 2, field: value})
        answer = client.post(PATH, content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400, 404), (value, answer.text)
        if answer.status_code == 400:
            assert answer.json()["error"]["type"] == "invalid_request_error"
