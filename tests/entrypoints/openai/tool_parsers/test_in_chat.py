"""Test every format through POST /v1/chat/completions: the stream and the whole answer agree."""

import json

import pytest

from tests.engine.tokenizers_for_tests import byte_level
from tests.entrypoints.openai.fakes import client_of
from tests.entrypoints.openai.tool_parsers.formats import CALLS, OUTPUTS
from tests.fake_core import FakeCoreLLM
from vllm.entrypoints.openai.chat import serving as serving_chat

TOOLS = [{"type": "function", "function": {"name": name}} for name, _ in CALLS]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def answer(text, body, **args):
    """Return (message, message joined from a stream) of a model with this text as its output."""
    tokens = byte_level().encode(text, add_special_tokens=False)
    engine = FakeCoreLLM(lambda request: tokens, max_model_len=2048)
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": len(tokens),
        "temperature": 0,
        **body,
    }
    with client_of(engine, serving_chat.router, chat_template=TEMPLATE, **args) as client:
        whole = client.post("/v1/chat/completions", json=body)
        assert whole.status_code == 200, whole.text
        stream = client.post("/v1/chat/completions", json=body | {"stream": True}).text
    [choice] = whole.json()["choices"]
    return choice["message"], joined(stream)


def joined(stream):
    message = {"reasoning_content": "", "content": "", "tool_calls": []}
    for line in stream.splitlines():
        if not line.startswith("data: {"):
            continue
        delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
        news = [key for key in message if delta.get(key)]
        assert len(news) <= 1 and len(delta.get("tool_calls", ())) <= 1, delta
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key) or ""
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                assert call["function"]["name"] and call["function"]["arguments"] == ""
                message["tool_calls"].append(call)
            else:
                function = message["tool_calls"][call["index"]]["function"]
                function["arguments"] += call["function"]["arguments"]
    return message


def calls_of(message):
    functions = [call["function"] for call in message["tool_calls"]]
    return [(each["name"], json.loads(each["arguments"])) for each in functions]


@pytest.mark.parametrize(("name", "text"), OUTPUTS)
def test_calls_come_out_of_the_server(name, text):
    args = {"enable_auto_tool_choice": True, "tool_call_parser": name}
    for message in answer(text, {"tools": TOOLS}, **args):
        assert calls_of(message) == CALLS
        assert not message["content"]


def test_thoughts_are_taken_off_before_calls_are_looked_for():
    text = "<think>I might <tool_call>.</think>\n\n" + dict(OUTPUTS)["hermes"]
    args = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    for message in answer(text, {"tools": TOOLS}, reasoning_parser="qwen3", **args):
        assert message["reasoning_content"] == "I might <tool_call>."
        assert calls_of(message) == CALLS
        assert not message["content"]
