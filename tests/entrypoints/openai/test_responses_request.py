"""Test the fields of the Responses API: the field of a chat request that each becomes, and refused
values.
"""

import pytest

from tests.loops import loop_over
from vllm.entrypoints.openai.protocol.chat import ChatCompletionNamedToolChoiceParam
from vllm.entrypoints.openai.protocol.responses import ResponsesRequest
from vllm.entrypoints.openai.responses.request import as_chat_request, check_request
from vllm.errors import RequestError

MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {}}


def tool(name, **fields):
    return {"type": "function", "name": name, "parameters": SCHEMA, **fields}


def convert(**fields):
    request = ResponsesRequest.model_validate({"input": "hi", **fields})
    check_request(request)
    return as_chat_request(request, MESSAGES)


@pytest.mark.parametrize(
    ("fields", "name", "wanted"),
    [
        ({"max_output_tokens": 7}, "max_completion_tokens", 7),
        ({"temperature": 0.5}, "temperature", 0.5),
        ({}, "temperature", None),
        ({"top_k": 3}, "top_k", 3),
        ({"seed": -5}, "seed", -5),
        ({"stop": ["a"]}, "stop", ["a"]),
        ({}, "parallel_tool_calls", True),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", False),
        ({}, "logprobs", False),
        ({"include": ["message.output_text.logprobs"]}, "logprobs", True),
        ({"include": ["reasoning.encrypted_content"]}, "logprobs", False),
        ({"top_logprobs": 3}, "top_logprobs", 3),
        ({"top_logprobs": 3}, "logprobs", True),
        ({"reasoning": {"effort": "low"}}, "chat_template_kwargs", {"reasoning_effort": "low"}),
        (
            {"reasoning": {"effort": "none"}, "chat_template_kwargs": {"a": 1}},
            "chat_template_kwargs",
            {"reasoning_effort": "none", "a": 1},
        ),
        ({"text": {"format": {"type": "text"}}}, "response_format", None),
        ({"tool_choice": "auto"}, "tool_choice", "none"),
        ({"tools": [tool("f")]}, "tool_choice", "auto"),
        ({"tools": [tool("f")], "tool_choice": "required"}, "tool_choice", "required"),
        # As clients write it that also use the chat API.
        ({"max_tokens": 7}, "max_completion_tokens", 7),
        ({"max_completion_tokens": 7, "max_output_tokens": 8}, "max_completion_tokens", 8),
        ({"reasoning_effort": "low"}, "chat_template_kwargs", {"reasoning_effort": "low"}),
        ({"tools": [tool("f")], "tool_choice": "any"}, "tool_choice", "required"),
        ({"tools": [tool("f")], "tool_choice": {"type": "auto"}}, "tool_choice", "auto"),
        ({"input": None, "messages": [{"role": "user", "content": "x"}]}, "n", 1),
        ({"service_tier": "fast"}, "n", 1),
    ],
)
def test_a_field_of_a_response_is_one_of_a_chat(fields, name, wanted):
    assert getattr(convert(**fields), name) == wanted


def test_a_schema_becomes_the_response_format():
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    wanted = convert(text={"format": form}).response_format
    assert (wanted.type, wanted.json_schema.json_schema) == ("json_schema", SCHEMA)


def test_tools_choices_and_formats_may_have_the_form_of_the_chat_api():
    function = {"name": "f", "parameters": SCHEMA}
    grammar = {"syntax": "regex", "definition": "a+"}
    body = convert(
        tools=[
            {"type": "function", "function": function},
            {
                "type": "custom",
                "custom": {"name": "p", "format": {"type": "grammar", "grammar": grammar}},
            },
        ],
        tool_choice={"type": "function", "function": {"name": "f"}},
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    )
    assert [each.function.name for each in body.function_tools] == ["f", "p"]
    assert body.custom_tools["p"].grammar.definition == "a+" and body.named_tool == "f"
    assert body.response_format.given_schema == SCHEMA


def test_a_named_function_has_to_be_called():
    chat = convert(tools=[tool("f"), tool("g")], tool_choice={"type": "function", "name": "g"})
    assert isinstance(chat.tool_choice, ChatCompletionNamedToolChoiceParam)
    assert chat.named_tool == "g"


def test_only_allowed_tools_reach_the_model():
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"name": "g"}]}
    chat = convert(tools=[tool("f"), tool("g", description="d")], tool_choice=choice)
    assert chat.tool_choice == "required"
    function = {"name": "g", "description": "d", "parameters": SCHEMA}
    assert [t.function.model_dump() for t in chat.tools] == [function]


@loop_over(
    "fields, param",
    [
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["reasoning"]}, "include"),
        ({"moderation": {}}, "moderation"),
        ({"background": True, "store": False}, "background"),
        ({"tools": [{"type": 7}]}, "tools[0].type"),
        ({"tools": [{"type": ""}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [tool("f", parameters="x")]}, "tools[0].parameters"),
        ({"tools": [tool("f", description=3)]}, "tools[0].description"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        *(
            (
                {
                    "tools": [tool("f")],
                    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [allowed]},
                },
                "tool_choice",
            )
            for allowed in (3, {}, {"name": ["f"]}, {"name": {}}, {"type": [], "name": "f"})
        ),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ],
)
def test_what_is_not_available_is_refused_by_its_name(fields, param):
    with pytest.raises(RequestError) as caught:
        convert(**fields)
    assert caught.value.param == param


FOREIGN_TOOLS = [
    {"type": kind}
    for kind in (
        *("web_search", "web_search_preview", "web_search_2025_08_26", "file_search", "mcp"),
        *("code_interpreter", "image_generation", "computer_use_preview", "computer", "shell"),
        *("local_shell", "namespace", "apply_patch", "tool_search", "a_tool_of_next_year"),
    )
]


def test_tools_of_other_servers_are_left_out():
    chat = convert(tools=[*FOREIGN_TOOLS, tool("f")])
    assert [each.function.name for each in chat.function_tools] == ["f"]
    assert chat.tool_choice == "auto"
    assert convert(tools=FOREIGN_TOOLS).tool_choice == "none"
    assert convert(tools=FOREIGN_TOOLS, tool_choice="auto").tool_choice == "none"


@pytest.mark.parametrize("foreign", FOREIGN_TOOLS)
def test_a_choice_of_a_tool_of_another_server_is_refused(foreign):
    what = f'must name a function or a custom tool, got the type "{foreign["type"]}"'
    with pytest.raises(RequestError, match=what):
        convert(tools=[*FOREIGN_TOOLS, tool("f")], tool_choice=foreign)
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [foreign]}
    with pytest.raises(RequestError, match="must have a function or a custom tool"):
        convert(tools=[*FOREIGN_TOOLS, tool("f")], tool_choice=allowed)
    allowed["tools"].append({"type": "function", "name": "f"})
    chat = convert(tools=[*FOREIGN_TOOLS, tool("f")], tool_choice=allowed)
    assert [each.function.name for each in chat.function_tools] == ["f"]


@pytest.mark.parametrize(
    "what",
    [
        *("file_search_call.results", "web_search_call.action.sources"),
        *("computer_call_output.output.image_url", "message.input_image.image_url"),
    ],
)
def test_what_belongs_to_items_of_other_servers_is_included_nowhere(what):
    assert convert(include=[what]).logprobs is False
