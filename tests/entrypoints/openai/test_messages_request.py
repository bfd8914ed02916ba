"""Test the fields of Anthropic's format: the field of a chat request that each becomes, and refused
values.
"""

import pytest

from vllm.entrypoints.anthropic.protocol import MessagesRequest
from vllm.entrypoints.anthropic.request import as_chat_request
from vllm.errors import RequestError

SCHEMA = {"type": "object", "properties": {}}
TOOL = {"name": "f", "input_schema": SCHEMA}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
USER = {"role": "user", "content": "hi"}


def convert(**fields):
    body = {"messages": [USER], "max_tokens": 5, **fields}
    return as_chat_request(MessagesRequest.model_validate(body))


@pytest.mark.parametrize(
    ("fields", "name", "wanted"),
    [
        ({}, "max_completion_tokens", 5),
        ({}, "temperature", None),
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"top_k": 3}, "top_k", 3),
        ({"stop_sequences": ["a"]}, "stop", ["a"]),
        ({}, "tool_choice", "none"),
        ({"tools": [TOOL]}, "tool_choice", "auto"),
        ({"tools": [SEARCH]}, "tool_choice", "none"),
        ({"tools": [SEARCH, TOOL]}, "tool_choice", "auto"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice", "required"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "named_tool", "f"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "parallel_tool_calls",
            False,
        ),
        ({"thinking": {"type": "disabled"}}, "chat_template_kwargs", {"enable_thinking": False}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            "chat_template_kwargs",
            {"enable_thinking": True},
        ),
        (
            {"output_config": {"effort": "low"}},
            "chat_template_kwargs",
            {"reasoning_effort": "low"},
        ),
        ({}, "continue_final_message", False),
        (
            {"messages": [USER, {"role": "assistant", "content": "we"}]},
            "continue_final_message",
            True,
        ),
    ],
)
def test_a_field_of_a_message_is_one_of_a_chat(fields, name, wanted):
    assert getattr(convert(**fields), name) == wanted


def test_a_schema_becomes_the_response_format():
    form = {"type": "json_schema", "schema": SCHEMA}
    config = {"format": form, "effort": "low"}
    for fields in (
        {"output_config": config},
        {"output_format": form},
        {"output_format": form, "output_config": config},
        {"output_format": form, "output_config": {"effort": "low"}},
    ):
        assert convert(**fields).response_format.json_schema.json_schema == SCHEMA


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "any"}},
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
        {"tools": [SEARCH], "tool_choice": {"type": "any"}},
        {"tools": [SEARCH, TOOL], "tool_choice": {"type": "tool", "name": "web_search"}},
        {"output_config": {"format": {"type": "json_object"}}},
        {"output_format": {"type": "json_object"}},
        {
            "output_format": {"type": "json_schema", "schema": SCHEMA},
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
        },
    ],
)
def test_what_is_not_available_is_refused(fields):
    with pytest.raises(RequestError, match=r"tool_choice|output_(config|format)"):
        convert(**fields)
