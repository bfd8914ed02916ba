"""Test events in Anthropic's format: their order, and the message that the official client builds
from them.
"""

import json

import pytest

from tests.entrypoints.openai.anthropic_client import accumulate
from tests.loops import loop_over
from vllm.entrypoints.anthropic.output import (
    MessageWriter,
    describe_stop,
    describe_usage,
)


def call(index, arguments, **first):
    return {"index": index, **first, "function": {**first, "arguments": arguments}}


def write(writer, *parts, stop=("end_turn", None)):
    """Return the events of a message; a part is ("text" | "reasoning" | "call", delta)."""
    add = {
        "text": writer.add_text,
        "reasoning": writer.add_reasoning,
        "call": writer.add_tool_call,
    }
    events = writer.begin(describe_usage(5, 0, 2))
    for kind, delta in parts:
        events += add[kind](delta)
    return events + writer.finish(*stop, describe_usage(5, 4, 2))


PARTS = {
    "nothing": [],
    "text": [("text", "a"), ("text", "b")],
    "all": [
        ("reasoning", "so"),
        ("reasoning", "!"),
        ("text", "a"),
        ("call", call(0, "", id="t1", name="add")),
        ("call", call(0, '{"a":')),
        ("call", call(0, "1}")),
        ("call", call(1, "{}", id="t2", name="sub")),
    ],
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_the_streamed_message_is_the_unstreamed_one(parts):
    writer = MessageWriter("msg_1", "m")
    events = write(writer, *parts, stop=("stop_sequence", "END"))
    streamed = accumulate(events).to_dict(exclude_unset=True)
    assert {key: streamed[key] for key in writer.message} == writer.message
    assert writer.message["usage"] == {
        "input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 4,
    }


def test_blocks_begin_and_end_one_after_the_other():
    events = write(MessageWriter("msg_1", "m"), *PARTS["all"])
    assert [(e["type"].removeprefix("content_block_"), e.get("index")) for e in events] == [
        ("message_start", None),
        ("ping", None),
        *[("start", 0), ("delta", 0), ("delta", 0), ("stop", 0)],
        *[("start", 1), ("delta", 1), ("stop", 1)],
        *[("start", 2), ("delta", 2), ("delta", 2), ("delta", 2), ("stop", 2)],
        *[("start", 3), ("delta", 3), ("delta", 3), ("stop", 3)],
        ("message_delta", None),
        ("message_stop", None),
    ]


@loop_over(
    "arguments",
    [
        *("{", "[]", "7", "null", '{"a": NaN}', '{"a": 1} and so on', '{"t": "He said "hi" and"}'),
        *('{"t": "cut o', '{"a":' * 100_000, '{"a": 1', "a=1", " "),
    ],
)
@loop_over("size", [1, 7, 10**6])
def test_damaged_arguments_are_given_whole_under_the_name_of_the_api(arguments, size):
    pieces = [arguments[i : i + size] for i in range(0, min(len(arguments), 4000), size)]
    first, *others = pieces
    writer = MessageWriter("msg_1", "m")
    parts = [("call", call(0, first, id="t1", name="add"))]
    events = write(writer, *parts, *(("call", call(0, piece)) for piece in others))
    wanted = {"INVALID_JSON": "".join(pieces)}
    assert writer.message["content"][0]["input"] == wanted
    assert accumulate(events).content[0].input == wanted


@pytest.mark.parametrize("arguments", ["", "{}", '{"a": [1, {"b": "\\u00e9"}], "c": null}'])
def test_sound_arguments_are_the_same_in_a_stream(arguments):
    writer = MessageWriter("msg_1", "m")
    events = write(writer, ("call", call(0, arguments, id="t1", name="add")))
    assert writer.message["content"][0]["input"] == json.loads(arguments or "{}")
    assert accumulate(events).content[0].input == json.loads(arguments or "{}")


def test_a_call_that_was_cut_before_its_arguments_is_not_a_call_without_arguments():
    writer = MessageWriter("msg_1", "m")
    parts = ("call", call(0, "", id="t1", name="add"))
    events = write(writer, parts, stop=("max_tokens", None))
    assert writer.message["content"][0]["input"] == {"INVALID_JSON": ""}
    assert accumulate(events).content[0].input == {"INVALID_JSON": ""}


@pytest.mark.parametrize(
    ("finish", "stop", "has_calls", "wanted"),
    [
        ("stop", None, False, ("end_turn", None)),
        ("stop", 7, False, ("end_turn", None)),
        ("stop", "END", False, ("stop_sequence", "END")),
        ("length", None, True, ("max_tokens", None)),
        ("tool_calls", None, True, ("tool_use", None)),
        ("stop", None, True, ("tool_use", None)),
    ],
)
def test_the_reason_of_the_end_has_its_word(finish, stop, has_calls, wanted):
    assert describe_stop(finish, stop, has_calls=has_calls) == wanted
