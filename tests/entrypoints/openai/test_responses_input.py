"""Items of the Responses API: what they become for a chat template, and what is refused."""

import pytest

from vllm.entrypoints.openai.responses.input import as_messages, read_input
from vllm.errors import RequestError

CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "2"}
TOOL_CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1}'},
}
TOOL_MESSAGE = {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"}


def assistant(content="", **others):
    return {"role": "assistant", "content": content, **others}


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ("hi", [{"role": "user", "content": "hi"}]),
        ([{"role": "user", "content": "hi"}], [{"role": "user", "content": "hi"}]),
        (
            [
                {
                    "type": "message",
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "a"},
                        {"type": "input_text", "text": "b"},
                    ],
                }
            ],
            [{"role": "user", "content": "a\nb"}],
        ),
        ([CALL, RESULT], [assistant(tool_calls=[TOOL_CALL]), TOOL_MESSAGE]),
        (
            [
                {"type": "reasoning", "summary": [], "content": "so"},
                {"role": "assistant", "content": "hm"},
                CALL,
                {**RESULT, "output": [{"type": "input_text", "text": "2"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
            ],
            [
                assistant("hm", reasoning_content="so", tool_calls=[TOOL_CALL]),
                TOOL_MESSAGE,
                assistant("two"),
            ],
        ),
        (
            [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]}],
            [assistant(reasoning_content="short")],
        ),
        (
            [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
            [assistant("no")],
        ),
    ],
)
def test_items_become_messages(given, messages):
    assert as_messages(None, read_input(given)) == messages


def test_instructions_and_first_system_messages_become_one():
    items = read_input(
        [
            {"role": "developer", "content": "b"},
            {"role": "user", "content": "c"},
            {"role": "system", "content": "d"},
        ]
    )
    assert as_messages("a", items) == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "c"},
        {"role": "system", "content": "d"},
    ]


def test_every_item_gets_an_id_and_keeps_one_it_has():
    items = read_input([{"role": "user", "content": "a"}, {**CALL, "id": "mine"}, RESULT])
    assert items[1]["id"] == "mine"
    assert [item["id"].split("_")[0] for item in items] == ["msg", "mine", "fco"]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([], "input"),
        ([7], "input[0]"),
        ([{"type": "web_search_call"}], "input[0].type"),
        ([{"type": ["message"]}], "input[0].type"),
        ([{"role": "tool", "content": "a"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": 7}], "input[0].content"),
        ([{"role": "user", "content": [7]}], "input[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
            "input[0].content[0].type",
        ),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": 1}]}],
            "input[0].content[0].text",
        ),
        (["a", {"role": "user", "content": "b"}], "input[0]"),
        ([{**CALL, "arguments": {"a": 1}}], "input[0].arguments"),
        ([{**CALL, "name": ""}], "input[0].name"),
        ([{**CALL, "id": 3}], "input[0].id"),
        ([{**CALL, "id": "x" * 300}], "input[0].id"),
        ([{**CALL, "call_id": None}], "input[0].call_id"),
        ([{**RESULT, "output": None}], "input[0].output"),
    ],
)
def test_a_wrong_item_is_refused_by_its_place(given, param):
    with pytest.raises(RequestError) as caught:
        read_input(given)
    assert caught.value.param == param
    assert len(str(caught.value)) < 500


def test_the_output_of_an_unknown_call_is_refused():
    with pytest.raises(RequestError, match="'c1'"):
        as_messages(None, read_input([RESULT]))
