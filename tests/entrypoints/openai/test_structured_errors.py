"""Test that errors about output constraints name the field that the user of each API sent."""

import pytest

from vllm.entrypoints.anthropic import request as messages
from vllm.entrypoints.anthropic.protocol import MessagesRequest
from vllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
)
from vllm.entrypoints.openai.protocol.sampling import guided_decoding
from vllm.entrypoints.openai.responses import request as responses
from vllm.structured_output.spec import field_of

SCHEMA = {"type": "object", "uniqueItems": True}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT_FORMAT = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}


def of_chat(**fields):
    return ChatCompletionRequest.model_validate({**CHAT, **fields})


def of_completion(**fields):
    return CompletionRequest.model_validate({"prompt": "hi", **fields})


def of_responses(**fields):
    request = ResponsesRequest.model_validate({"input": "hi", **fields})
    return responses.as_chat_request(request, CHAT["messages"])


def of_messages(**fields):
    body = {"model": "m", "max_tokens": 5, **CHAT, **fields}
    return messages.as_chat_request(MessagesRequest.model_validate(body))


@pytest.mark.parametrize(
    ("make", "fields", "name"),
    [
        (of_chat, {"response_format": FORMAT}, "response_format"),
        (of_chat, {"response_format": {"type": "json_object"}}, "response_format"),
        (of_chat, {"guided_json": SCHEMA}, "guided_json"),
        (of_chat, {"guided_regex": "a"}, "guided_regex"),
        (of_chat, {"guided_choice": ["a"]}, "guided_choice"),
        (of_chat, {"guided_grammar": 'root ::= "a"'}, "guided_grammar"),
        (of_chat, {"structural_tag": "{}"}, "structural_tag"),
        (of_completion, {"response_format": FORMAT}, "response_format"),
        (of_completion, {"guided_regex": "a"}, "guided_regex"),
        (of_responses, {"text": TEXT_FORMAT}, "text.format"),
        (
            of_messages,
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            "output_config.format",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)[:30]),
)
def test_the_form_keeps_the_name_of_its_field(make, fields, name):
    body = make(**fields)
    assert field_of(guided_decoding(body)) == name
    assert field_of(guided_decoding(body.model_copy())) == name


def test_a_format_is_for_answers_and_calls_that_are_required_have_their_own():
    body = of_responses(text=TEXT_FORMAT, tools=[TOOL], tool_choice="required")
    assert body.has_response_format and body.tool_choice == "required"


def test_a_constraint_beside_calls_that_are_required_is_refused_by_its_own_name():
    tool = {"type": "function", "function": {"name": "look"}}
    message = "guided_regex: cannot be combined with this tool_choice"
    with pytest.raises(ValueError, match=message):
        of_chat(guided_regex="a", tools=[tool], tool_choice="required")
