"""Test tool calls of a live server with the official client.

The bundled model was not trained for tools. So its output is constrained to one text with a call in
it, which the parser and the protocol must handle.
"""

import json
import re

import pytest
from openai import BadRequestError, OpenAI

pytestmark = pytest.mark.e2e

ARGUMENTS = '{"city": "Oslo", "days": [1, 2]}'
OUTPUT = f'Wait.<tool_call>{{"name": "weather", "arguments": {ARGUMENTS}}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
REQUEST = {
    "model": "",
    "messages": [{"role": "user", "content": "Weather?"}],
    "tools": [TOOL],
    "max_tokens": 200,
    "extra_body": {"guided_choice": [OUTPUT]},
}


@pytest.fixture
def client(chat_server):
    with OpenAI(base_url=f"{chat_server.url}/v1", api_key="x") as client:
        yield client


def test_a_call_is_found_in_a_whole_answer(client):
    choice = client.chat.completions.create(**REQUEST).choices[0]
    [call] = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
    assert (choice.message.content, choice.finish_reason) == ("Wait.", "tool_calls")


def test_a_call_is_found_in_a_stream(client):
    with client.chat.completions.stream(**REQUEST) as stream:
        arguments = [
            event.arguments_delta
            for event in stream
            if event.type == "tool_calls.function.arguments.delta"
        ]
        choice = stream.get_final_completion().choices[0]
    [call] = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
    assert (choice.message.content, choice.finish_reason) == ("Wait.", "tool_calls")
    assert len(arguments) > 2, "arguments come as they grow"
    assert json.loads("".join(arguments)) == json.loads(ARGUMENTS)


def test_the_text_is_content_where_no_tools_are_wanted(client):
    request = REQUEST | {"tool_choice": "none"}
    choice = client.chat.completions.create(**request).choices[0]
    assert (choice.message.content, choice.finish_reason) == (OUTPUT, "stop")
    assert not choice.message.tool_calls


CUSTOM = {
    "type": "custom",
    "custom": {
        "name": "dial",
        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": r"\d{3}-\d{4}"}},
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "custom": {"name": "dial"}}])
def test_the_input_of_a_custom_tool_follows_its_grammar(client, choice):
    request = {**REQUEST, "tools": [CUSTOM], "tool_choice": choice, "extra_body": {}}
    [call] = client.chat.completions.create(**request).choices[0].message.tool_calls
    assert (call.type, call.custom.name) == ("custom", "dial")
    assert re.fullmatch(r"\d{3}-\d{4}", call.custom.input, re.ASCII)
    chunks = list(client.chat.completions.create(**request, stream=True))
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    text = "".join(delta.custom["input"] for delta in deltas)
    assert re.fullmatch(r"\d{3}-\d{4}", text, re.ASCII)


def test_a_lark_grammar_constrains_a_custom_tool_of_a_response(client):
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "on" | "off"'}
    tool = {"type": "custom", "name": "switch", "format": grammar}
    choice = {"type": "custom", "name": "switch"}
    response = client.responses.create(model="", input="x", tools=[tool], tool_choice=choice)
    [item] = response.output
    assert (item.type, item.name) == ("custom_tool_call", "switch")
    assert item.input in ("on", "off")


def test_allowed_tools_are_the_only_ones_that_are_called(client):
    tools = [TOOL, {"type": "function", "function": {"name": "look"}}]
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "look"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    request = {**REQUEST, "tools": tools, "tool_choice": choice, "extra_body": {}}
    request.update(parallel_tool_calls=False)
    [call] = client.chat.completions.create(**request).choices[0].message.tool_calls
    assert call.function.name == "look"


UNIQUE = {"type": "array", "uniqueItems": True}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
NAMED = {"type": "function", "function": {"name": "f"}}
STRICT_UNIQUE = {"name": "f", "parameters": UNIQUE, "strict": True}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (
            "/chat/completions",
            {
                **CHAT,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": UNIQUE, "strict": True},
                },
            },
            "response_format",
        ),
        ("/chat/completions", {**CHAT, "guided_json": UNIQUE}, "guided_json"),
        ("/chat/completions", {**CHAT, "guided_regex": r"\y"}, "guided_regex"),
        ("/chat/completions", {**CHAT, "guided_grammar": "x"}, "guided_grammar"),
        ("/completions", {"prompt": "x", "guided_choice": []}, "guided_choice"),
        (
            "/chat/completions",
            {
                **CHAT,
                "tools": [{"type": "function", "function": STRICT_UNIQUE}],
                "tool_choice": NAMED,
            },
            "tools",
        ),
        (
            "/responses",
            {
                "input": "x",
                "text": {
                    "format": {
                        "type": "json_schema",
                        "name": "a",
                        "schema": UNIQUE,
                        "strict": True,
                    }
                },
            },
            "text.format",
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_form_that_cannot_be_enforced_is_refused_by_the_name_of_its_field(
    client, path, body, field
):
    with pytest.raises(BadRequestError) as failure:
        client.post(path, body=body, cast_to=object)
    assert failure.value.param == field
    assert failure.value.body["message"].startswith(f"{field}")


@pytest.mark.parametrize("strict", [{}, {"strict": None}, {"strict": False}], ids=str)
def test_a_schema_that_is_not_strict_is_enforced_as_far_as_possible(client, strict):
    form = {"type": "json_schema", "json_schema": {"schema": UNIQUE, **strict}}
    body = {**CHAT, "max_tokens": 8, "response_format": form}
    answer = client.post("/chat/completions", body=body, cast_to=object)
    assert answer["choices"][0]["message"]["content"].lstrip().startswith("[")
    tool = {"type": "function", "function": {"name": "f", "parameters": UNIQUE, **strict}}
    body = {**CHAT, "max_tokens": 8, "tools": [tool], "tool_choice": NAMED}
    answer = client.post("/chat/completions", body=body, cast_to=object)
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"].lstrip().startswith("[")
