"""Conversations in Anthropic's form: what they become for a chat template, and what is refused."""

import pytest

from vllm.entrypoints.anthropic.input import as_messages, as_tool_choice, as_tools
from vllm.entrypoints.anthropic.protocol import Conversation
from vllm.errors import RequestError

USE = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "2"}
TOOL_CALL = {
    "id": "t1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1}'},
}
TOOL_MESSAGE = {"role": "tool", "tool_call_id": "t1", "name": "add", "content": "2"}
SCHEMA = {"type": "object", "properties": {}}


def text(value):
    return {"type": "text", "text": value}


def convert(*turns, system=None):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return as_messages(Conversation(messages=messages, system=system))


def test_a_conversation_with_tools_becomes_messages():
    messages = convert(
        [text("a"), text("b")],
        [{"type": "thinking", "thinking": "so", "signature": "s"}, text("hm"), USE],
        [RESULT, text("go on")],
        "two",
        system=[text("be"), text("brief")],
    )
    assert messages == [
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "hm",
            "reasoning_content": "so",
            "tool_calls": [TOOL_CALL],
        },
        TOOL_MESSAGE,
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": "two"},
    ]


@pytest.mark.parametrize(
    ("result", "content"),
    [
        (RESULT, "2"),
        ({**RESULT, "content": [text("2"), text("3")]}, "2\n3"),
        ({**RESULT, "content": None}, ""),
        ({**RESULT, "is_error": True}, "Error: 2"),
    ],
)
def test_a_turn_of_results_is_only_messages_of_tools(result, content):
    assert convert("a", [USE], [result])[2:] == [{**TOOL_MESSAGE, "content": content}]


@pytest.mark.parametrize(
    ("turns", "param"),
    [
        ([[{"type": "image", "source": {}}]], "messages.0.content.0.type"),
        ([[USE]], "messages.0.content.0.type"),
        ([[{"type": 3}]], "messages.0.content.0"),
        ([[{"type": "text"}]], "messages.0.content.0.text"),
        (["a", [{**USE, "input": "x"}]], "messages.1.content.0.input"),
        (["a", [{**USE, "name": ""}]], "messages.1.content.0.name"),
        ([[RESULT]], "messages.0.content.0.tool_use_id"),
        (
            ["a", [USE], [{**RESULT, "content": [{"type": "image"}]}]],
            "messages.2.content.0.content.0.type",
        ),
        (["a", [USE], [{**RESULT, "content": 4}]], "messages.2.content.0.content"),
    ],
)
def test_a_wrong_block_is_refused_by_its_place(turns, param):
    with pytest.raises(RequestError) as caught:
        convert(*turns)
    assert caught.value.param == param


def test_tools_become_functions():
    tool = {"name": "add", "description": "adds", "input_schema": SCHEMA, "type": "custom"}
    function = {"name": "add", "parameters": SCHEMA, "description": "adds"}
    assert as_tools([tool]) == [{"type": "function", "function": function}]
    assert as_tools([]) is None


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "web_search_20250305", "name": "web_search"}, "tools.0.type"),
        ({"name": "add"}, "tools.0.input_schema"),
        ({"input_schema": SCHEMA}, "tools.0.name"),
        ({"name": "add", "input_schema": SCHEMA, "description": 3}, "tools.0.description"),
    ],
)
def test_a_wrong_tool_is_refused_by_its_place(tool, param):
    with pytest.raises(RequestError) as caught:
        as_tools([tool])
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, (None, True)),
        ({"type": "auto"}, ("auto", True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)),
        ({"type": "none"}, ("none", True)),
        (
            {"type": "tool", "name": "add"},
            ({"type": "function", "function": {"name": "add"}}, True),
        ),
    ],
)
def test_tool_choice_takes_the_words_of_the_chat_api(choice, wanted):
    assert as_tool_choice(choice) == wanted


@pytest.mark.parametrize("choice", [{"type": "all"}, {"type": ["any"]}, {"type": "tool"}, {}])
def test_a_wrong_tool_choice_is_refused(choice):
    with pytest.raises(RequestError, match="tool_choice"):
        as_tool_choice(choice)
