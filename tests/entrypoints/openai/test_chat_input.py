"""Test POST /v1/chat/completions with a body of the Responses API, as Cursor's agent sends it."""

import pytest
from pydantic import ValidationError

from tests.entrypoints.openai.fakes import client_of
from tests.entrypoints.openai.sse_reader import chunks_of
from tests.entrypoints.openai.test_chat import AUTO, engine_that_says
from tests.loops import loop_over
from vllm.entrypoints.http.validation_text import describe_validation
from vllm.entrypoints.openai.chat.body import ChatBody
from vllm.entrypoints.openai.chat.serving import router

PATH = "/v1/chat/completions"
HI = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}}
FORMAT = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "r"}


@loop_over(
    "body, messages",
    [
        ({"input": "hi"}, [HI]),
        ({"input": "hi", "messages": []}, [HI]),
        ({"input": "hi", "messages": None}, [HI]),
        ({"input": "no", "messages": [HI]}, [HI]),
        ({"input": [HI], "instructions": "I"}, [{"role": "system", "content": "I"}, HI]),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]},
            [HI],
        ),
        (
            {"input": [HI, CALL, OUTPUT], "tools": [LOOK]},
            [
                HI,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {
                            "id": "c",
                            "type": "function",
                            "function": {"name": "look", "arguments": "{}"},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c", "name": "look", "content": "r"},
            ],
        ),
    ],
)
def test_items_become_messages(body, messages):
    assert ChatBody.model_validate(body).messages == messages


def test_other_fields_of_responses_have_their_meaning():
    body = ChatBody.model_validate(
        {
            "input": "hi",
            "max_output_tokens": 5,
            "text": {"format": FORMAT, "verbosity": "low"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "tools": [LOOK, {"type": "web_search"}],
            "tool_choice": {"type": "function", "name": "look"},
        }
    )
    assert body.wanted_tokens == 5 and body.thinking_kwargs == {"reasoning_effort": "low"}
    assert body.response_format.given_schema == SCHEMA
    assert [t.function.name for t in body.function_tools] == ["look"] and body.named_tool == "look"


@loop_over(
    "body, param, words",
    [
        ({"input": []}, "input", "must not be empty"),
        ({"input": 5}, "input", "text or a list of items"),
        ({"input": [{"role": "x", "content": ""}]}, "input[0].role", "must be one of user"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"input": "a", "instructions": 5}, "instructions", "must be a string"),
        (
            {"input": "a", "text": {"format": {"type": "json_schema"}}},
            "text.format.schema",
            "schema",
        ),
        ({"input": "a", "previous_response_id": "r"}, "previous_response_id", "to /v1/responses"),
        ({"prompt": "a"}, "messages", "has prompt instead: rename it to messages, or send"),
        ({}, "messages", "messages is required"),
    ],
)
def test_errors_name_the_field_that_the_client_sent(body, param, words):
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate(body)
    message, found = describe_validation(
        [{**each, "loc": ("body", *each["loc"])} for each in caught.value.errors()]
    )
    assert found == param and words in message


def test_the_answer_has_the_form_of_the_chat_api():
    engine = engine_that_says('<tool_call>{"name": "look", "arguments": {}}</tool_call>')
    with client_of(engine, router, **AUTO) as client:
        body = {"input": [HI], "tools": [LOOK], "stream": True, "store": False, "include": []}
        chunks = chunks_of(client.post(PATH, json=body).text)
        deltas = [
            call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])
        ]
        assert chunks[0]["object"] == "chat.completion.chunk"
        assert deltas[0]["function"]["name"] == "look"
        error = client.post(PATH, json={"input": [5]}).json()["error"]
        assert error["param"] == "input" and error["message"].startswith("input")
