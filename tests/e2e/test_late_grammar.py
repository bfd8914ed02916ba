"""Test thoughts and calls before structured output, through a live server.

The bundled model generates neither. So the parsers take a line for thoughts, a line break or a
special token for their end, and a word for the start of a call.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from openai import OpenAI

from tests.e2e.server import start_server
from tests.entrypoints.openai.scripted_engine import TEMPLATE

pytestmark = pytest.mark.e2e

SPECIAL, SPECIAL_ID = "<pad>", 2
"""A token that the model knows and never writes, unless it is made to."""
PLUGIN = f"""
from vllm.entrypoints.openai.protocol.tools import CallForm
from vllm.entrypoints.openai.tool_parsers import ToolParserManager
from vllm.entrypoints.openai.tool_parsers.json_calls import JsonToolParser
from vllm.reasoning import ReasoningParser, ReasoningParserManager


@ReasoningParserManager.register_module("line")
class LineParser(ReasoningParser):
    starts = ("#",)
    ends = ("\\n", "{SPECIAL}")
    is_start_optional = True


@ToolParserManager.register_module("word")
class WordParser(JsonToolParser):
    markers = ("import",)
    form = CallForm()

    def read_calls(self, marker):
        if not (yield from self.read_json(is_marked=True)):
            self.start_call("f")
            self.add_arguments("{{}}")
"""
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "f"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    plugin: Path = tmp_path_factory.mktemp("plugin") / "parsers.py"
    plugin.write_text(PLUGIN)
    flags = (
        *("--max-model-len", "512", "--chat-template", TEMPLATE, "--tool-parser-plugin", plugin),
        *("--reasoning-parser", "line"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "word"),
    )
    with (
        start_server(*map(str, flags)) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="x") as client,
    ):
        yield client


def ask(client: OpenAI, *, seed: int = 0, **body):
    """Return the first choice of an answer."""
    messages = [{"role": "user", "content": "x"}]
    more = body.pop("extra_body", {})
    answer = client.chat.completions.create(
        model="", messages=messages, max_tokens=300, seed=seed, extra_body=more, **body
    )
    return answer.choices[0]


def test_the_answer_follows_its_format_behind_thoughts(client):
    choices = [ask(client, seed=seed, response_format=FORMAT) for seed in range(4)]
    for choice in choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    thoughts = [choice.message.reasoning_content for choice in choices]
    assert all(text and "\n" not in text for text in thoughts)


def test_a_special_token_ends_thoughts_and_nobody_sees_it(client):
    bias = {str(SPECIAL_ID): 100}
    choice = ask(client, response_format=FORMAT, logit_bias=bias)
    assert getattr(choice.message, "reasoning_content", None) is None
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_no_thoughts_no_delay(client):
    choice = ask(client, response_format=FORMAT, extra_body=NO_THOUGHTS)
    assert getattr(choice.message, "reasoning_content", None) is None
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)


@pytest.mark.parametrize("tool_choice", ["required", NAMED])
def test_a_model_thinks_before_a_call_that_it_has_to_make(client, tool_choice):
    choice = ask(client, tools=[TOOL], tool_choice=tool_choice, response_format=FORMAT)
    assert choice.message.reasoning_content and not choice.message.content
    for call in choice.message.tool_calls:
        assert call.function.name == "f"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


def test_a_model_answers_or_calls(client):
    word, brace = (
        client.post("/../tokenize", body={"prompt": text}, cast_to=object)["tokens"][-1]
        for text in ("import", "{")
    )
    body = {"tools": [TOOL], "response_format": FORMAT, "extra_body": NO_THOUGHTS}
    answer = ask(client, **body, logit_bias={str(brace): 100})
    assert not answer.message.tool_calls
    jsonschema.validate(json.loads(answer.message.content), SCHEMA)
    call = ask(client, **body, logit_bias={str(word): 100})
    assert call.message.tool_calls[0].function.name == "f"


@pytest.mark.parametrize("is_strict", [False, True])
def test_only_calls_of_strict_tools_follow_their_schemas(client, is_strict):
    function = {**TOOL["function"], "strict": is_strict}
    tool = {**TOOL, "function": function}
    word = client.post("/../tokenize", body={"prompt": "import"}, cast_to=object)["tokens"][-1]
    choice = ask(client, tools=[tool], extra_body=NO_THOUGHTS, logit_bias={str(word): 50})
    calls = choice.message.tool_calls
    assert len(calls) > 2 and not choice.message.content
    arguments = [json.loads(call.function.arguments) for call in calls[:-1]]
    assert all(call.function.name == "f" for call in calls)
    is_held = [jsonschema.Draft202012Validator(SCHEMA).is_valid(each) for each in arguments]
    assert all(is_held) if is_strict else not any(is_held)
