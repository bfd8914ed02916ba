"""Test the items of the Responses API: the messages that a chat template gets, and refused
values.
"""

import json

import pytest

from tests.loops import loop_over
from vllm.entrypoints.openai.shared.response_items import (
    as_messages,
    read_input,
    resolve_references,
)
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
        (  # messages of the chat API
            [
                {"role": "user", "content": ["a", {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": ["2"]},
                {"role": "assistant", "content": "two", "tool_calls": None},
            ],
            [
                {"role": "user", "content": "a\nb"},
                assistant(tool_calls=[TOOL_CALL]),
                TOOL_MESSAGE,
                assistant("two"),
            ],
        ),
        (
            [
                assistant(
                    "so",
                    tool_calls=[
                        {"id": "c1", "type": "custom", "custom": {"name": "p", "input": "x"}}
                    ],
                ),
                {"role": "tool", "tool_call_id": "c1", "content": "2"},
            ],
            [
                assistant(
                    "so",
                    tool_calls=[
                        {"id": "c1", "type": "custom", "custom": {"name": "p", "input": "x"}}
                    ],
                ),
                {**TOOL_MESSAGE, "name": "p"},
            ],
        ),
        (  # as some clients send back what was empty or an object
            [
                {"role": "assistant", "content": None},
                {**CALL, "arguments": {"a": 1}},
                {**RESULT, "output": None},
                {**CALL, "call_id": "c2", "arguments": None},
                {**RESULT, "call_id": "c2", "output": {"b": 2}},
            ],
            [
                assistant(
                    tool_calls=[
                        {**TOOL_CALL, "function": {"name": "add", "arguments": '{"a":1}'}},
                    ]
                ),
                {**TOOL_MESSAGE, "content": ""},
                assistant(
                    tool_calls=[
                        {**TOOL_CALL, "id": "c2", "function": {"name": "add", "arguments": ""}},
                    ]
                ),
                {**TOOL_MESSAGE, "tool_call_id": "c2", "content": '{"b":2}'},
            ],
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


def test_images_become_parts_that_name_their_place():
    image = {"type": "input_image", "image_url": "http://a/b.png"}
    as_in_chats = {"type": "input_image", "image_url": {"url": "http://a/b.png", "detail": "low"}}
    output = [{"type": "input_text", "text": "2"}, {**image, "detail": "low"}, as_in_chats]
    messages = as_messages(
        None,
        read_input([{"role": "user", "content": [image]}, CALL, {**RESULT, "output": output}]),
    )
    part = {"type": "image", "url": "http://a/b.png"}
    assert messages[0]["content"] == [part | {"detail": "auto", "where": "input[0].content[0]"}]
    assert messages[2]["content"] == [
        {"type": "text", "text": "2"},
        part | {"detail": "low", "where": "input[2].output[1]"},
        part | {"detail": "low", "where": "input[2].output[2]"},
    ]


def test_places_are_those_of_the_request_that_continues_another():
    turn = {"role": "user", "content": [{"type": "input_image", "image_url": "http://a/b.png"}]}
    messages = as_messages(None, read_input([turn, CALL, RESULT, turn]), num_earlier=3)
    places = [m["content"][0]["where"] for m in messages if m["role"] == "user"]
    assert places == ["previous_response_id.input[0].content[0]", "input[0].content[0]"]


@loop_over(
    "given, param",
    [
        ([], "input"),
        ([7], "input[0]"),
        ([{"type": ""}], "input[0].type"),
        ([{"content": "hi"}], "input[0].type"),
        ([{"type": "item_reference"}], "input[0].id"),
        ([{"type": "shell_call", "call_id": 7}], "input[0].call_id"),
        ([{"type": ["message"]}], "input[0].type"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "human", "content": "a"}], "input[0].role"),
        ([{"role": "tool", "content": "a"}], "input[0].tool_call_id"),
        ([{"role": "assistant", "tool_calls": [5]}], "input[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{}]}], "input[0].tool_calls[0].id"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "c1"}]}],
            "input[0].tool_calls[0].function.name",
        ),
        ([{"role": "user", "content": 7}], "input[0].content"),
        ([{"role": "user", "content": [7]}], "input[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}],
            "input[0].content[0].file_id",
        ),
        (
            [{"role": "user", "content": [{"type": "input_image"}]}],
            "input[0].content[0].image_url",
        ),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": {"url": 5}}]}],
            "input[0].content[0].image_url.url",
        ),
        (
            [{"role": "system", "content": [{"type": "input_image", "image_url": "x"}]}],
            "input[0].content[0].type",
        ),
        (
            [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}],
            "input[0].content[0].file_id",
        ),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": 1}]}],
            "input[0].content[0].text",
        ),
        (["a", {"role": "user", "content": "b"}], "input[0]"),
        ([{**CALL, "arguments": [1]}], "input[0].arguments"),
        ([{**CALL, "name": ""}], "input[0].name"),
        ([{**CALL, "id": 3}], "input[0].id"),
        ([{**CALL, "id": "x" * 300}], "input[0].id"),
        ([{**CALL, "call_id": None}], "input[0].call_id"),
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


SHELL = {"type": "local_shell_call", "id": "lsh", "call_id": "c1", "status": "completed"}
ACTION = {"type": "exec", "command": ["ls"], "env": {}}
PATCH = {"type": "update_file", "path": "a", "diff": "+b"}
STREAMS = [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]


@pytest.mark.parametrize(
    ("items", "name", "arguments", "output"),
    [
        (
            [
                {**SHELL, "action": ACTION},
                {"type": "local_shell_call_output", "id": "lsh", "output": "a"},
            ],
            "local_shell",
            ACTION,
            "a",
        ),
        (
            [{**SHELL, "action": ACTION}, {**RESULT, "output": "a"}],
            "local_shell",
            ACTION,
            "a",
        ),
        (
            [
                {"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"]}},
                {"type": "shell_call_output", "call_id": "c1", "output": STREAMS},
            ],
            "shell",
            {"commands": ["ls"]},
            STREAMS,
        ),
        (
            [
                {"type": "apply_patch_call", "call_id": "c1", "operation": PATCH},
                {"type": "apply_patch_call_output", "call_id": "c1", "status": "completed"},
            ],
            "apply_patch",
            PATCH,
            "",
        ),
        (
            [{"type": "mcp_call", "id": "c1", "name": "f", "arguments": '{"a":1}', "output": "a"}],
            "f",
            {"a": 1},
            "a",
        ),
        (
            [
                {
                    "type": "mcp_call",
                    "id": "mcp_1",
                    "call_id": "c1",
                    "name": "f",
                    "arguments": "",
                    "error": {"m": 1},
                }
            ],
            "f",
            {},
            {"m": 1},
        ),
    ],
)
def test_calls_that_the_client_runs_are_calls_for_the_model(items, name, arguments, output):
    call, result = as_messages(None, read_input(items))
    made = call["tool_calls"][0]
    assert json.loads(made["function"]["arguments"]) == arguments
    assert (made["function"]["name"], made["id"], result["tool_call_id"]) == (name, "c1", "c1")
    assert result["name"] == name
    text = output if isinstance(output, str) else json.dumps(output, separators=(",", ":"))
    assert result["content"] == text


def test_a_call_of_the_client_with_damaged_arguments_has_none():
    items = [{"type": "shell_call", "call_id": "c1", "action": "ls"}]
    (message,) = as_messages(None, read_input(items))
    assert message["tool_calls"][0]["function"]["arguments"] == "{}"


FOREIGN = [
    {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search"}},
    {"type": "file_search_call", "id": "fs", "queries": ["a"], "results": None},
    {"type": "code_interpreter_call", "id": "ci", "code": "1", "outputs": None},
    {"type": "image_generation_call", "id": "ig", "result": None},
    {"type": "computer_call", "id": "cc", "call_id": "k", "action": {"type": "wait"}},
    {"type": "computer_call_output", "call_id": "k", "output": {"type": "computer_screenshot"}},
    {"type": "mcp_list_tools", "id": "ml", "server_label": "s", "tools": []},
    {"type": "mcp_approval_request", "id": "ma", "name": "f", "arguments": "{}"},
    {"type": "mcp_approval_response", "approval_request_id": "ma", "approve": True},
    {"type": "mcp_call", "id": "mc"},
    {"type": "compaction", "id": "co", "encrypted_content": "x"},
    {"type": "compaction_trigger"},
    {"type": "item_reference", "id": "msg_gone"},
    {"id": "msg_gone"},
    {"type": "tool_search_output", "call_id": "ts", "tools": []},
    {"type": "shell_call_output", "call_id": "lost", "output": []},
    {"type": "an_item_of_next_year", "content": [{"anything": 1}]},
    {"type": "reasoning", "id": "rs", "summary": [], "content": None, "encrypted_content": "x"},
]


@pytest.mark.parametrize("item", FOREIGN, ids=lambda item: item.get("type", "id"))
def test_an_item_of_another_server_is_kept_in_the_list_and_not_shown_to_the_model(item):
    items = read_input([{"role": "user", "content": "a"}, item, {"role": "user", "content": "b"}])
    assert [each["type"] for each in items] == [
        "message",
        item.get("type", "item_reference"),
        "message",
    ]
    assert items[1]["id"]
    assert as_messages(None, items) == [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
    ]


def test_the_output_of_a_call_that_was_left_out_is_left_out():
    items = [FOREIGN[-6], RESULT, {"role": "user", "content": "b"}]
    assert as_messages(None, read_input(items)) == [{"role": "user", "content": "b"}]


def test_an_input_of_which_nothing_is_left_is_refused():
    with pytest.raises(RequestError, match="that the model can read"):
        as_messages(None, read_input(FOREIGN[:1]))


def test_a_reference_stands_for_the_stored_item():
    known = read_input([{**CALL, "id": "fc_1"}, {"role": "user", "content": "a", "id": "m_1"}])
    stored = {item["id"]: item for item in known}

    def find(ids):
        return {key: stored[key] for key in ids if key in stored}

    items = read_input([{"type": "item_reference", "id": "fc_1"}, RESULT, {"id": "m_1"}])
    assert resolve_references(items, [], find) == [known[0], items[1], known[1]]
    assert resolve_references(items, known[1:], find) == [known[0], items[1]]
    assert resolve_references(items[1:2], [], lambda ids: pytest.fail("nothing to find"))
