"""Tool calls through a live server, by the official client.

The bundled model knows no tools: its output is constrained to one text with a call in it, which
then has to find its way through parser and protocol.
"""

import json

import pytest
from openai import OpenAI

from tests.e2e.server import start_server

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


@pytest.fixture(scope="module")
def client():
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with start_server(*flags) as server, OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
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
