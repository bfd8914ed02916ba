"""Test conversations in Anthropic's format: the messages that a chat template gets, and refused
values.
"""

import logging

import pytest

from vllm.entrypoints.anthropic.input import as_messages, as_tool_choice, as_tools
from vllm.entrypoints.anthropic.protocol import Conversation
from vllm.entrypoints.http.ignored import forget_ignored
from vllm.errors import RequestError

USE = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "2"}
TOOL_CALL = {
    "id": "t1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1}'},
}
TOOL_MESSAGE = {"role": "tool", "tool_call_id": "t1", "name": "add", "content": "2"}
PNG = {"type": "base64", "media_type": "image/png"}
SOURCE_TYPE = "messages.0.content.0.source.type"
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
    ("given", "arguments"),
    [(None, "{}"), ({}, "{}"), ("", ""), ('{"a": 1}', '{"a": 1}'), ('{"a', '{"a')],
)
def test_the_input_of_a_call_may_be_its_json_text_or_missing(given, arguments):
    block = {key: value for key, value in USE.items() if key != "input"}
    for use in ({**block, "input": given}, *([block] if given is None else [])):
        (call,) = convert("a", [use], [RESULT])[1]["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": arguments}


def test_system_messages_stay_where_they_are():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "98 tokens left"},
        {"role": "assistant", "content": "b"},
        {"role": "system", "content": [text("x"), {"type": "tool_addition", "tool": {}}]},
        {"role": "user", "content": "c"},
    ]
    assert as_messages(Conversation(messages=messages, system="S")) == [
        {"role": "system", "content": "S"},
        *messages[:3],
        {"role": "system", "content": "x"},
        messages[4],
    ]


BILLING = "x-anthropic-billing-header: cc_version=2.1; cch="


@pytest.mark.parametrize(
    ("system", "wanted"),
    [
        ([text(BILLING + "1;"), text("be"), text("brief")], "be\nbrief"),
        ([text(BILLING + "1;\nbe brief")], "be brief"),
        (BILLING + "1;\nbe brief", "be brief"),
        ([text("be"), text(BILLING + "1;")], "be"),
        ([text("say x-anthropic-billing-header: a")], "say x-anthropic-billing-header: a"),
        ([text("a"), text(""), text("b")], "a\n\nb"),
        ([text(BILLING)], None),
        (BILLING, None),
    ],
)
def test_the_billing_header_is_no_part_of_the_prompt(system, wanted):
    messages = convert("hi", system=system)
    system_messages = [] if wanted is None else [{"role": "system", "content": wanted}]
    assert messages == [*system_messages, {"role": "user", "content": "hi"}]


CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
FOUND = {"type": "search_result", "source": "http://a", "title": "T", "content": [text("F")]}


@pytest.mark.parametrize(
    ("block", "wanted"),
    [
        ({**text("a"), **CACHED, "citations": None}, "a"),
        (DOCUMENT, "D"),
        ({**DOCUMENT, "title": "T", "context": "C", **CACHED}, "T\nC\nD"),
        ({"type": "document", "source": {"type": "content", "content": "D"}}, "D"),
        ({"type": "document", "source": {"type": "content", "content": [text("D")]}}, "D"),
        (FOUND, "T\nhttp://a\nF"),
        ({"type": "tool_reference", "tool_name": "grep"}, "grep"),
        ({"type": "container_upload", "file_id": "f"}, ""),
        ({"type": "a_type_of_next_year"}, ""),
    ],
)
def test_a_block_of_the_user_is_read_as_text_or_left_out(block, wanted):
    assert convert([text("1"), block])[0]["content"] == "\n".join(filter(None, ["1", wanted]))
    results = convert("a", [USE], [{**RESULT, "content": [text("1"), block]}])
    assert results[-1]["content"] == "\n".join(filter(None, ["1", wanted]))


def test_what_the_servers_of_the_api_did_is_left_out_of_a_turn():
    turn = [
        {"type": "thinking", "thinking": "", "signature": "s"},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
        {"type": "mcp_tool_use", "id": "m1", "name": "f", "server_name": "s", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "m1", "content": [text("x")]},
        {"type": "compaction", "content": "so far"},
        {"type": "compaction", "content": None},
        {**text("done"), **CACHED},
        {**USE, **CACHED, "caller": {"type": "direct"}},
    ]
    message = convert("a", turn, [RESULT])[1]
    assert message == {
        "role": "assistant",
        "reasoning_content": "",
        "content": "so far\n\ndone",
        "tool_calls": [TOOL_CALL],
    }


@pytest.fixture
def log():
    """Return the lines of the log, in which no earlier message is suppressed."""
    forget_ignored()
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("vllm.entrypoints.http.ignored")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def test_what_is_left_out_is_in_the_log_once(log):
    for _ in range(3):
        convert([{"type": "container_upload", "file_id": "f"}, text("a")])
        as_tools([{"type": "memory_20250818", "name": "memory"}])
    assert [line.partition(":")[0] for line in log] == [
        "content blocks of the type 'container_upload'",
        "tools of the type 'memory_20250818'",
    ]


def test_images_become_parts_that_name_their_place():
    url = {"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}
    data = {**PNG, "data": "AAAA"}
    messages = convert(
        [text("a"), url],
        [USE],
        [{**RESULT, "content": [{"type": "image", "source": data}], "is_error": True}],
    )
    part = {"type": "image", "detail": None}
    assert messages[0]["content"] == [
        text("a"),
        part | {"url": "http://a/b.png", "where": "messages.0.content.1.source"},
    ]
    assert messages[2]["content"] == [
        text("Error:"),
        part
        | {
            "url": "data:image/png;base64,AAAA",
            "where": "messages.2.content.0.content.0.source",
        },
    ]


@pytest.mark.parametrize(
    ("turns", "param"),
    [
        ([[{"type": "image", "source": {}}]], "messages.0.content.0.source.type"),
        ([[{"type": "image", "source": {"type": "file", "file_id": "f"}}]], SOURCE_TYPE),
        ([[{"type": "image", "source": {"type": "url"}}]], "messages.0.content.0.source.url"),
        (
            [[{"type": "image", "source": {"type": "base64", "media_type": "text/html"}}]],
            "messages.0.content.0.source.media_type",
        ),
        (
            [[{"type": "image", "source": {"type": "base64", "media_type": "image/png"}}]],
            "messages.0.content.0.source.data",
        ),
        (
            [[{"type": "image", "source": {**PNG, "data": "Data:image/png;base64,AAAA"}}]],
            "messages.0.content.0.source.data",
        ),
        ([[{"type": "audio"}]], "messages.0.content.0.type"),
        (["a", [{"type": "image", "source": {}}]], "messages.1.content.0.type"),
        ([[USE]], "messages.0.content.0.type"),
        (
            [[{**DOCUMENT, "source": {"type": "base64", "data": "JVBE"}}]],
            "messages.0.content.0.source.type",
        ),
        ([[{"type": "document"}]], "messages.0.content.0.source.type"),
        ([[{**FOUND, "content": 7}]], "messages.0.content.0.content"),
        ([[{"type": "tool_reference"}]], "messages.0.content.0.tool_name"),
        ([[{"type": 3}]], "messages.0.content.0"),
        ([[{"type": "text"}]], "messages.0.content.0.text"),
        (["a", [{**USE, "input": [1]}]], "messages.1.content.0.input"),
        (["a", [{**USE, "name": ""}]], "messages.1.content.0.name"),
        ([[RESULT]], "messages.0.content.0.tool_use_id"),
        (
            ["a", [USE], [{**RESULT, "content": [{"type": "image"}]}]],
            "messages.2.content.0.content.0.source",
        ),
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
    assert as_tools([{"name": "add"}]) == [{"type": "function", "function": {"name": "add"}}]
    assert as_tools([]) is None


SERVER_TOOLS = [
    {"type": kind, "name": kind.rpartition("_")[0]}
    for kind in (
        *("web_search_20250305", "web_fetch_20260318", "bash_20250124", "computer_20251124"),
        *("text_editor_20250728", "code_execution_20250825", "memory_20250818"),
        *("tool_search_tool_regex_20251119", "browser_toolset_20260801", "next_year_20270101"),
    )
]


def test_tools_of_the_servers_are_left_out():
    tool = {"name": "add", "input_schema": SCHEMA, **CACHED, "defer_loading": True, "strict": True}
    mcp = {"type": "mcp_toolset", "mcp_server_name": "s"}
    found = as_tools([*SERVER_TOOLS, tool, mcp])
    assert [each["function"]["name"] for each in found] == ["add"]
    assert as_tools(SERVER_TOOLS) is None


@pytest.mark.parametrize("tool", SERVER_TOOLS)
def test_a_choice_of_a_tool_that_is_left_out_is_refused(tool):
    with pytest.raises(RequestError, match=f'"{tool["type"]}", which this server does not run'):
        as_tool_choice({"type": "tool", "name": tool["name"]}, SERVER_TOOLS)


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": 7, "name": "web_search"}, "tools.0.type"),
        ({"type": "", "name": "web_search"}, "tools.0.type"),
        ({"name": "add", "input_schema": []}, "tools.0.input_schema"),
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
