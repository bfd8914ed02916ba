"""Test thoughts, text and calls of a model through a live server, with each of its APIs.

Each text is generated in several tokenizations, as a whole and streamed, and each answer must be
the same.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.forced_text import CUTS

pytestmark = pytest.mark.e2e

FUNCTION = {"name": "look", "parameters": {"type": "object"}}
ARGUMENTS = '{"at": "Łódź 日本", "deep": [1, {"a": "</tool_call>"}]}'
CALL = f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'
# (output of the model, (thoughts, text, arguments of its calls))
SAID = {
    "thoughts and text": ("<think>Hm <b>.</think>So < be it.", ("Hm <b>.", "So < be it.", [])),
    "text and a call": (f"Wait.{CALL}", ("", "Wait.", [ARGUMENTS])),
    "thoughts and calls": (
        f"<think>\n{CALL}\n</think>{CALL}\n{CALL}",
        (f"\n{CALL}\n", "", [ARGUMENTS, ARGUMENTS]),
    ),
    "a marker without a call": ("a <tool_call> b", ("", "a <tool_call> b", [])),
    "thoughts without an end": ("<think>On and on </thi", ("On and on </thi", "", [])),
    "a damaged call": (
        '<tool_call>{"name": "look", "arguments": {"at": "cu',
        ("", "", ['{"at": "cu']),
    ),
}


def post(server, path, body):
    """Return the answer, or the `data` of all events of a stream."""
    status, _, answer = server.request("POST", path, body, **{"anthropic-version": "2023-06-01"})
    assert status == 200, answer
    if not body.get("stream"):
        return json.loads(answer)
    lines = [line.removeprefix("data: ") for line in answer.decode().split("\n")]
    return [json.loads(line) for line in lines if line.startswith("{")]


def by_chat(server, forced, *, is_streamed):
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "max_tokens": 600,
        "stream": is_streamed,
        "enable_thinking": True,
        "forced": forced,
    }
    answer = post(server, "/v1/chat/completions", body)
    deltas = [
        choice["delta" if is_streamed else "message"]
        for part in (answer if is_streamed else [answer])
        for choice in part["choices"]
    ]
    calls = {}
    for delta in deltas:
        for number, call in enumerate(delta.get("tool_calls") or ()):
            index = call.get("index", number)
            calls[index] = calls.get(index, "") + call["function"]["arguments"]
    texts = ("".join(d.get(k) or "" for d in deltas) for k in ("reasoning_content", "content"))
    return (*texts, list(calls.values()))


def by_responses(server, forced, *, is_streamed):
    body = {
        "input": "x",
        "tools": [{"type": "function", **FUNCTION}],
        "max_output_tokens": 600,
        "chat_template_kwargs": {"enable_thinking": True},
        "stream": is_streamed,
        "forced": forced,
    }
    answer = post(server, "/v1/responses", body)
    if is_streamed:
        answer = answer[-1]["response"]
    thoughts, text, calls = "", "", []
    for item in answer["output"]:
        if item["type"] == "function_call":
            calls.append(item["arguments"])
        elif item["type"] == "reasoning":
            thoughts += "".join(part["text"] for part in item["content"])
        else:
            text += "".join(part["text"] for part in item["content"])
    return thoughts, text, calls


def by_messages(server, forced, *, is_streamed):
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        "thinking": {"type": "enabled", "budget_tokens": 500},
        "max_tokens": 600,
        "stream": is_streamed,
        "forced": forced,
    }
    answer = post(server, "/v1/messages", body)
    if not is_streamed:
        blocks = answer["content"]
        calls = [json.dumps(b["input"], ensure_ascii=False) for b in blocks if "input" in b]
        texts = ("".join(b.get(kind, "") for b in blocks) for kind in ("thinking", "text"))
        return (*texts, calls)
    parts = {"thinking": "", "text": ""}
    calls = {}
    for event in answer:
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                index = event["index"]
                calls[index] = calls.get(index, "") + delta["partial_json"]
            else:
                for kind in parts:
                    parts[kind] += delta.get(kind, "")
    return (*parts.values(), list(calls.values()))


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("ask", [by_chat, by_responses, by_messages])
def test_every_tokenization_is_read_the_same(chat_server, ask, is_streamed):
    # A whole answer is joined before it is parsed, so the size of its tokens does not matter.
    # All APIs have the parsers of the chat, which reads every character for itself as well.
    cuts = CUTS if ask is by_chat else ("tokenizer", "markers")
    # The arguments of a call in a message must be an object.
    cases = [
        (name, cut)
        for name in SAID
        if name != "a damaged call" or ask is not by_messages
        for cut in (cuts if is_streamed else ("tokenizer",))
    ]

    def read(case):
        name, cut = case
        return ask(chat_server, {"text": SAID[name][0], "cut": cut}, is_streamed=is_streamed)

    with ThreadPoolExecutor(len(cases)) as threads:  # all requests run in one batch
        for (name, cut), found in zip(cases, threads.map(read, cases), strict=True):
            assert found == SAID[name][1], (name, cut)


def test_a_request_without_the_field_is_not_forced(chat_server):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "temperature": 0}
    answers = [
        post(chat_server, "/v1/chat/completions", {**body, **more})["choices"][0]["message"]
        for more in ({}, {"forced": {"text": "forced"}}, {})
    ]
    assert answers[1]["content"] == "forced" != answers[0]["content"] == answers[2]["content"]
