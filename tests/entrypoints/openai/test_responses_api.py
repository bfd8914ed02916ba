"""Test POST /v1/responses and the related routes, with an engine that generates the text of the
test.
"""

import asyncio
import itertools
import json
import re
import time

import pytest

from tests.entrypoints.openai.scripted_engine import (
    ODD_VALUES,
    ScriptedEngine,
    make_app,
    make_client,
    open_stream,
)
from tests.fake_core import running
from tests.loops import loop_over
from vllm.entrypoints.openai.protocol.responses import ResponsesRequest
from vllm.errors import CapacityError, EngineDeadError

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}

HERMES = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
CALLS = [
    "I add.",
    '<tool_call>{"name": "add", "arguments": {"a"',
    ": 1}}</tool_call>",
    '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
]


def post(client, **fields):
    return client.post(PATH, json={"input": "hi", **fields})


def read_events(response):
    """Return the events of a stream; the name of each event must be its type."""
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def without_ids(value):
    """Return a response without the fields that differ from one response to the next."""
    if isinstance(value, dict):
        changing = ("id", "created_at", "completed_at", "call_id")
        return {k: without_ids(v) for k, v in value.items() if k not in changing}
    return [without_ids(v) for v in value] if isinstance(value, list) else value


def test_the_id_of_the_client_is_part_of_that_of_the_engine():
    engine = ScriptedEngine("a")
    made = make_client(engine).post(PATH, json={"input": "hi"}, headers={"x-request-id": "mine"})
    assert list(engine.requests) == [f"{made.json()['id']}-mine"]


def prompts(engine):
    return [prompt for prompt, _ in engine.requests.values()]


@pytest.mark.parametrize(
    ("pieces", "settings", "fields"),
    [
        (["Hel", "", "lo"], {}, {}),
        ([], {}, {}),
        (["Hel", "lo"], {}, {"top_logprobs": 1}),
        (["<think>so", " so</think>", "yes"], {"reasoning_parser": "deepseek_r1"}, {}),
        (CALLS, HERMES, {"tools": [TOOL]}),
        (
            ['[{"name": "add", "parameters": {"a"', ": 1}}]"],
            {},
            {"tools": [TOOL], "tool_choice": "required"},
        ),
        (
            ['{"a": ', "1}"],
            {},
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "add"}},
        ),
    ],
    ids=["text", "nothing", "logprobs", "reasoning", "auto", "required", "named"],
)
def test_the_streamed_response_is_the_unstreamed_one(pieces, settings, fields):
    client = make_client(ScriptedEngine(*pieces), **settings)
    whole = post(client, **fields)
    assert whole.status_code == 200
    events = read_events(post(client, **fields, stream=True))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.completed"
    assert without_ids(events[-1]["response"]) == without_ids(whole.json())
    usage = whole.json()["usage"]
    assert usage["output_tokens"] == len(pieces) + 1
    assert usage["input_tokens_details"]["cached_tokens"] == 4


def test_input_tokens_are_counted_as_for_a_response():
    client = make_client(ScriptedEngine("a"), **HERMES)
    first = post(client, instructions="Add.", tools=[TOOL]).json()
    following = post(client, previous_response_id=first["id"]).json()
    for response, fields in (
        (first, {"instructions": "Add.", "tools": [TOOL]}),
        (following, {"previous_response_id": first["id"]}),
    ):
        counted = client.post(f"{PATH}/input_tokens", json={"input": "hi", **fields})
        assert counted.json() == {
            "object": "response.input_tokens",
            "input_tokens": response["usage"]["input_tokens"],
        }
    refused = client.post(f"{PATH}/input_tokens", json={"input": [{"role": "user"}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[0].content")


def test_output_items_are_what_the_parsers_found():
    client = make_client(ScriptedEngine("<think>so</think>", "yes"), reasoning_parser="deepseek_r1")
    thought, message = post(client).json()["output"]
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "so")
    assert (message["type"], message["content"][0]["text"]) == ("message", "yes")
    client = make_client(ScriptedEngine('[{"name": "add", "parameters": {"a": 1}}]'))
    (call,) = post(client, tools=[TOOL], tool_choice="required").json()["output"]
    assert (call["type"], call["name"]) == ("function_call", "add")
    assert json.loads(call["arguments"]) == {"a": 1}


@pytest.mark.parametrize(("is_parallel", "num_calls"), [(True, 2), (False, 1)])
def test_the_model_may_call_tools_beside_its_text(is_parallel, num_calls):
    client = make_client(ScriptedEngine(*CALLS), **HERMES)
    answer = post(client, tools=[TOOL], parallel_tool_calls=is_parallel).json()
    message, *calls = answer["output"]
    assert message["content"][0]["text"].strip() == "I add."
    assert [(c["type"], c["name"]) for c in calls] == [("function_call", "add")] * num_calls
    assert json.loads(calls[0]["arguments"]) == {"a": 1}
    assert len({c["call_id"] for c in calls}) == num_calls


def test_log_probabilities_are_there_when_asked_for():
    client = make_client(ScriptedEngine("a", "b"))
    (message,) = post(client, top_logprobs=1).json()["output"]
    logprobs = message["content"][0]["logprobs"]
    assert len(logprobs) == 3, "the end token has one too"
    assert logprobs[0]["logprob"] == -0.5
    assert len(logprobs[0]["top_logprobs"]) == 1
    (message,) = post(client).json()["output"]
    assert message["content"][0]["logprobs"] == []


def test_the_length_limit_makes_a_response_incomplete():
    engine = ScriptedEngine("a", "b", "c")
    response = post(make_client(engine), max_output_tokens=3).json()
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [params.max_tokens for _, params in engine.requests.values()] == [3]


def test_the_response_repeats_what_was_asked():
    fields = {
        "instructions": "brief",
        "metadata": {"a": "b"},
        "tools": [{**TOOL, "strict": None}],
        "tool_choice": "none",
        "truncation": "auto",
        "user": "me",
        "temperature": 0.5,
        "reasoning": {"effort": "low", "summary": None},
        "text": {"format": {"type": "json_object"}, "verbosity": "low"},
    }
    response = post(make_client(ScriptedEngine("{}")), **fields).json()
    assert {name: response[name] for name in fields} == fields
    assert response["model"] == "stdlib"


# ---- conversations ------------------------------------------------------------------------


def test_a_response_continues_an_earlier_one_without_its_instructions():
    engine = ScriptedEngine("yes")
    client = make_client(engine)
    first = post(client, instructions="brief").json()["id"]
    second = post(client, input="why", previous_response_id=first, instructions="long").json()
    third = post(client, input="so", previous_response_id=second["id"])
    assert prompts(engine)[1:] == [
        "<system>long<user>hi<assistant>yes<user>why<assistant>",
        "<user>hi<assistant>yes<user>why<assistant>yes<user>so<assistant>",
    ]
    assert third.json()["previous_response_id"] == second["id"]


def test_calls_and_their_outputs_reach_the_model():
    engine = ScriptedEngine('[{"name": "add", "parameters": {}}]')
    client = make_client(engine)
    first = post(client, tools=[TOOL], tool_choice="required").json()
    output = {"type": "function_call_output", "call_id": first["output"][0]["call_id"]}
    follow = post(client, input=[{**output, "output": "2"}], previous_response_id=first["id"])
    assert follow.status_code == 200
    assert prompts(engine)[1] == "<user>hi<assistant>[add]<tool>2<assistant>"


def test_a_request_of_codex_is_served():
    engine = ScriptedEngine("yes")
    client = make_client(engine, **HERMES)
    patch = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    body = {
        "instructions": "I",
        "input": [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "D"}],
            },
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
            {"type": "web_search_call", "status": "completed", "action": {"type": "search"}},
            {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** P"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
        ],
        "tools": [
            TOOL,
            {"type": "web_search", "external_web_access": False},
            {"type": "namespace", "name": "n", "description": "d", "tools": [TOOL]},
            {"type": "custom", "name": "apply_patch", "description": "p", "format": patch},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "prompt_cache_key": "k",
        "context_management": [{"type": "compaction", "compact_threshold": 1000}],
        "client_metadata": {"a": "b"},
        "text": {"verbosity": "low"},
    }
    answer = client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    ((prompt, _),) = engine.requests.values()
    assert prompt == ("<system>I\n\nD<user>a<assistant>[apply_patch]<tool>done<user>b<assistant>")


def test_a_reference_to_an_item_of_a_stored_response_is_resolved():
    engine = ScriptedEngine("yes")
    client = make_client(engine)
    first = post(client).json()
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    lost = {"type": "item_reference", "id": "msg_lost"}
    question = {"role": "user", "content": "b"}
    post(client, input=[{"role": "user", "content": "a"}, reference, lost, question])
    post(client, input=[reference, question], previous_response_id=first["id"])
    _, second, third = (prompt for prompt, _ in engine.requests.values())
    assert second == "<user>a<assistant>yes<user>b<assistant>"
    assert third == "<user>hi<assistant>yes<user>b<assistant>"


def test_a_stored_response_is_retrieved_listed_and_deleted():
    client = make_client(ScriptedEngine("yes"))
    first = post(client).json()
    second = post(client, input="why", previous_response_id=first["id"]).json()
    url = f"{PATH}/{second['id']}"
    assert client.get(url).json() == second
    items = client.get(f"{url}/input_items", params={"order": "asc", "limit": 2}).json()
    assert [item["content"][0]["text"] for item in items["data"]] == ["hi", "yes"]
    assert items["has_more"] is True
    after = {"order": "asc", "after": items["last_id"]}
    rest = client.get(f"{url}/input_items", params=after).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["why"]
    assert client.get(f"{url}/input_items", params={"after": "x"}).status_code == 400
    assert client.delete(url).json()["deleted"] is True
    assert client.get(url).status_code == 404
    assert client.get(f"{PATH}/{first['id']}").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_not_there_when_it_was_not_to_be_stored(stream):
    engine = ScriptedEngine("yes")
    client = make_client(engine)
    post(client, store=False, stream=stream)
    (response_id,) = engine.requests
    assert client.get(f"{PATH}/{response_id}").status_code == 404
    assert post(client, previous_response_id=response_id).status_code == 404


def test_a_response_belongs_to_the_key_that_made_it():
    client = make_client(ScriptedEngine("yes"), api_key=("one", "two"))

    def header(key):
        return {"Authorization": f"Bearer {key}"}

    made = client.post(PATH, json={"input": "hi"}, headers=header("one")).json()
    url = f"{PATH}/{made['id']}"
    assert client.get(url, headers=header("two")).status_code == 404
    assert client.get(url, headers=header("one")).status_code == 200
    assert client.get(url, headers={"x-api-key": "one"}).status_code == 200


def test_truncation_leaves_out_the_oldest_turns_but_not_the_system_message():
    engine = ScriptedEngine("yes", max_model_len=64)
    client = make_client(engine)
    turns = [{"role": "user", "content": f"question {i}"} for i in range(40)]
    assert post(client, input=turns).status_code == 400
    answer = post(client, input=turns, instructions="brief", truncation="auto", max_output_tokens=8)
    assert answer.status_code == 200
    (prompt,) = prompts(engine)
    assert prompt.startswith("<system>brief<user>question ")
    assert prompt.endswith("<user>question 39<assistant>")
    num_kept = prompt.count("question")
    assert 0 < num_kept < 40
    more = turns[-num_kept - 1 :]
    fields = {"instructions": "brief", "max_output_tokens": 8}
    assert post(client, input=more, **fields).status_code == 400, "one more would not have fit"
    alone = [{"role": "user", "content": "a b c " * 100}]
    assert post(client, input=alone, truncation="auto").status_code == 400


# ---- errors -------------------------------------------------------------------------------


@loop_over(
    "fields, status, text",
    [
        ({"model": "other"}, 404, "`other` does not exist"),
        ({"input": None}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": [{"type": "computer_call"}]}, 400, "that the model can read"),
        ({"tool_choice": {"type": "web_search"}}, 400, "web_search"),
        ({"tools": [TOOL]}, 400, "--tool-call-parser"),
        ({"conversation": "c"}, 400, "conversation"),
        ({"previous_response_id": "resp_x"}, 404, "resp_x"),
        ({"previous_response_id": "", "max_output_tokens": 10**9}, 400, "context length"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"max_output_tokens": 10**9}, 400, "context length"),
        ({"max_output_tokens": 10**30}, 400, "max_output_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "nan"}, 400, "temperature"),
        ({"top_p": 1.5}, 400, "top_p"),
        ({"top_logprobs": 21}, 400, "top_logprobs"),
        ({"seed": 2**63}, 400, "must be at most"),
        ({"metadata": {"a": 1}}, 400, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, 400, "metadata"),
        ({"truncation": "maybe"}, 400, "truncation"),
        ({"stop": [""]}, 400, "stop"),
        ({"chat_template_kwargs": {"tools": []}}, 400, "chat_template_kwargs"),
    ],
)
@loop_over("stream", [False, True])
def test_a_bad_request_is_refused_with_a_status(fields, status, text, stream):
    engine = ScriptedEngine("yes")
    answer = post(make_client(engine), **fields, stream=stream)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert text in error["message"]
    if fields.get("previous_response_id"):
        assert error["param"] == "previous_response_id"
    assert not engine.requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [(CapacityError("full", status=503), 503), (EngineDeadError("dead"), 500), (KeyError(), 500)],
)
def test_an_early_error_of_the_engine_has_its_status(error, status, stream):
    engine = ScriptedEngine("yes")
    engine.error = error
    assert post(make_client(engine), stream=stream).status_code == status


def test_an_error_in_between_ends_the_stream_as_failed():
    engine = ScriptedEngine("a", "b")
    engine.error, engine.error_at = EngineDeadError("the core died"), 1
    events = read_events(post(client := make_client(engine), stream=True))
    assert [event["type"] for event in events[-2:]] == ["response.failed", "error"]
    response = events[-2]["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "the core died"}
    assert response["output"][0]["content"][0]["text"] == "a"
    assert client.get(f"{PATH}/{response['id']}").json()["status"] == "failed"
    assert post(client).status_code == 500


# ---- clients that disconnect, and background responses ------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(stream):
    engine = ScriptedEngine("a", "b")
    engine.hold()

    async def run():
        body = json.dumps({"input": "hi", "stream": stream}).encode()
        async with running(engine):
            async with open_stream(make_app(engine), PATH, body) as opened:
                if stream:
                    await opened.read_until(b"output_text.delta")
                while not engine.core.running:
                    await asyncio.sleep(0)
            await engine.settle()
        assert engine.aborted == list(engine.requests)

    asyncio.run(run())


def wait_for_status(client, response_id, status):
    for _ in range(12_000):
        response = client.get(f"{PATH}/{response_id}").json()
        if response["status"] == status:
            return response
        time.sleep(0.01)
    raise AssertionError(f"{response['status']} in place of {status}")


def test_a_background_response_is_made_while_nobody_waits():
    engine = ScriptedEngine("a", "b")
    engine.hold()
    client = make_client(engine)
    made = post(client, background=True).json()
    assert (made["status"], made["background"]) == ("queued", True)
    wait_for_status(client, made["id"], "in_progress")
    assert client.get("/load").json() == {"server_load": 1}
    early = post(client, previous_response_id=made["id"])
    assert (early.status_code, early.json()["error"]["param"]) == (400, "previous_response_id")
    engine.release()
    done = wait_for_status(client, made["id"], "completed")
    assert done["output"][0]["content"][0]["text"] == "ab"
    assert client.get("/load").json() == {"server_load": 0}
    assert client.post(f"{PATH}/{made['id']}/cancel").json() == done
    assert post(client, previous_response_id=made["id"]).status_code == 200


@pytest.mark.parametrize("way", ["cancel", "delete"])
def test_a_background_response_that_is_cancelled_leaves_the_engine(way):
    engine = ScriptedEngine("a", "b")
    engine.hold()
    client = make_client(engine)
    made = post(client, background=True).json()
    wait_for_status(client, made["id"], "in_progress")
    url = f"{PATH}/{made['id']}"
    if way == "cancel":
        cancelled = client.post(f"{url}/cancel").json()
        assert cancelled["status"] == "cancelled"
        assert cancelled["output"][0]["content"][0]["text"] == "a"
        assert client.get(url).json() == cancelled
    else:
        assert client.delete(url).status_code == 200
        assert client.get(url).status_code == 404
    assert engine.aborted == [made["id"]]


def test_only_background_responses_are_cancelled_or_streamed_again():
    client = make_client(ScriptedEngine("a"))
    url = f"{PATH}/{post(client).json()['id']}"
    assert client.post(f"{url}/cancel").status_code == 400
    assert client.get(url, params={"stream": True}).json()["error"]["param"] == "stream"
    assert post(client, background=True, store=False).json()["error"]["param"] == "background"


def test_a_background_stream_can_be_taken_up_again():
    client = make_client(ScriptedEngine("a", "b"))
    events = read_events(post(client, background=True, stream=True))
    types = [event["type"] for event in events]
    assert types[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert types[-1] == "response.completed"
    url = f"{PATH}/{events[0]['response']['id']}"
    again = client.get(url, params={"stream": True, "starting_after": 3})
    assert read_events(again) == events[4:]


def test_a_background_stream_survives_the_client():
    engine = ScriptedEngine("a", "b")
    engine.hold()

    async def run():
        app = make_app(engine)
        body = json.dumps({"input": "hi", "background": True, "stream": True}).encode()
        async with running(engine):
            async with open_stream(app, PATH, body) as opened:
                started = await opened.read_until(b"output_text.delta")
            engine.release()
            [name] = set(re.findall(rb'"(resp_\w+)"', started))
            entry = app.state.responses.get(name.decode(), b"")
            async for _ in entry.job.follow():
                pass
        assert entry.response["status"] == "completed"
        assert engine.aborted == []

    asyncio.run(run())


def test_a_background_response_that_fails_says_so():
    engine = ScriptedEngine("a")
    engine.error = CapacityError("full", status=503)
    client = make_client(engine)
    made = post(client, background=True).json()
    assert wait_for_status(client, made["id"], "failed")["error"]["message"] == "full"


# ---- fuzz ---------------------------------------------------------------------------------


def test_any_value_of_a_field_is_taken_or_refused():
    client = make_client(ScriptedEngine("a"))
    for field, value in itertools.product(sorted(ResponsesRequest.model_fields), ODD_VALUES):
        body = json.dumps({"input": "hi", "max_output_tokens": 2, field: value})
        answer = client.post(PATH, content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400, 404), (field, value, answer.text)
        if answer.status_code == 400:
            assert len(answer.json()["error"]["message"]) < 4100
