"""Test the events of the Responses API: order, numbers, and the response that the official client
builds.
"""

import msgspec
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from vllm.entrypoints.openai.protocol.responses import ResponsesRequest, echo_fields
from vllm.entrypoints.openai.responses.output import ResponseWriter, describe_usage

EVENTS = TypeAdapter(ResponseStreamEvent)
USAGE = describe_usage(
    num_prompt_tokens=3, num_output_tokens=4, num_cached_tokens=1, num_reasoning_tokens=2
)


def make_writer(**options):
    request = ResponsesRequest.model_validate({"input": "hi", **options})
    response = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": "m",
        "output": [],
        "error": None,
        "incomplete_details": None,
        "temperature": 1.0,
        "top_p": 1.0,
        **echo_fields(request),
    }
    return ResponseWriter(response)


def call(index, arguments, **first):
    return {"index": index, **first, "function": {**first, "arguments": arguments}}


def write(writer, *parts, status="completed", **ending):
    """Return the events of a response; a part is ("text" | "reasoning" | "call", delta)."""
    add = {
        "text": writer.add_text,
        "reasoning": writer.add_reasoning,
        "call": writer.add_tool_call,
    }
    events = writer.begin()
    for kind, delta in parts:
        events += add[kind](delta)
    return msgspec.json.decode(
        msgspec.json.encode(events + writer.finish(status, usage=USAGE, **ending))
    )


def types(events):
    return [event["type"].removeprefix("response.") for event in events]


def test_events_of_a_text_come_in_the_order_of_the_api():
    writer = make_writer()
    events = write(writer, ("text", "a"), ("text", "b"))
    assert types(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(10))
    assert [event["delta"] for event in events[4:6]] == ["a", "b"]
    assert events[6]["text"] == events[7]["part"]["text"] == "ab"
    assert events[8]["item"]["content"] == [events[7]["part"]]
    assert events[0]["response"]["output"] == events[1]["response"]["output"] == []
    assert events[9]["response"] == msgspec.json.decode(msgspec.json.encode(writer.response))
    assert events[9]["response"]["usage"]["total_tokens"] == 7


def test_reasoning_text_and_calls_are_items_one_after_the_other():
    writer = make_writer()
    events = write(
        writer,
        ("reasoning", "so"),
        ("text", "hm"),
        ("call", call(0, "", id="c1", name="add")),
        ("call", call(0, '{"a"')),
        ("call", call(0, ":1}")),
        ("call", call(1, "{}", id="c2", name="sub")),
    )
    assert types(events)[2:] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    output = writer.response["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"] + ["function_call"] * 2
    assert [(c["call_id"], c["name"], c["arguments"]) for c in output[2:]] == [
        ("c1", "add", '{"a":1}'),
        ("c2", "sub", "{}"),
    ]
    indices = {e["item_id"]: e["output_index"] for e in events if "item_id" in e}
    assert indices == {item["id"]: i for i, item in enumerate(output)}


@pytest.mark.parametrize(
    ("status", "ending", "last", "item_status"),
    [
        ("incomplete", {"incomplete_reason": "max_output_tokens"}, "incomplete", "incomplete"),
        ("failed", {"error": {"code": "server_error", "message": "x"}}, "failed", "incomplete"),
        ("cancelled", {}, "output_item.done", "incomplete"),
        ("completed", {}, "completed", "completed"),
    ],
)
def test_the_end_tells_how_it_ended(status, ending, last, item_status):
    writer = make_writer()
    events = write(writer, ("text", "a"), status=status, **ending)
    assert types(events)[-1] == last
    assert writer.response["status"] == status
    assert writer.response["output"][0]["status"] == item_status
    details = writer.response["incomplete_details"]
    assert (details or {}).get("reason") == ending.get("incomplete_reason")


def test_a_model_that_says_nothing_answers_with_an_empty_message():
    writer = make_writer()
    write(writer)
    assert [part["text"] for part in writer.response["output"][0]["content"]] == [""]


def test_the_official_types_take_every_event():
    function = {"name": "add"}
    writer = make_writer(
        tools=[{"type": "function", **function}, {"type": "function", "function": function}],
        tool_choice={"type": "function", "function": function},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        metadata={"a": "b"},
        reasoning={"effort": "low"},
    )
    parts = [("reasoning", "so"), ("text", "a"), ("call", call(0, "{}", id="c", name="add"))]
    for event in [*make_writer().queue(), *write(writer, *parts)]:
        parsed = EVENTS.validate_python(event)
        assert parsed.to_dict(exclude_unset=True)["type"] == event["type"]
    response = Response.model_validate(writer.response)
    assert response.output_text == "a"
    assert response.tool_choice.name == "add"
    # The types of Python would accept it without these fields, other clients would not.
    echoed = {"type": "function", **function, "parameters": None, "strict": None}
    assert writer.response["tools"] == [echoed] * 2
