"""Test requests with thoughts, calls and special tokens: the parameters that the engine gets, and
the answer that the client gets.
"""

import json
import re

import pytest
from tokenizers import AddedToken

from tests.entrypoints.openai.scripted_engine import TEMPLATE, ScriptedEngine, make_client

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "f"}}
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
LIST = '[{"name": "f", "parameters": {}}]'
TOOLS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
OPEN = TEMPLATE + "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
CLOSED = TEMPLATE + "<think>\n\n</think>\n\n"


def ask(engine, settings, **body):
    """Return the message, the text of its stream, and the parameters that the engine got."""
    content = "What does <think> do?" if type(engine) is ScriptedEngine else "x"
    messages = [{"role": "user", "content": content}]
    body = {"model": "", "messages": messages, **body}
    client = make_client(engine, **settings)
    answer = client.post("/v1/chat/completions", json=body)
    streamed = client.post("/v1/chat/completions", json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    content = "".join(delta.get("content") or "" for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    message = answer.json()["choices"][0]["message"]
    assert (message["content"] or "") == content
    assert (message.get("reasoning_content") or "") == reasoning
    params = next(iter(engine.requests.values()))[1]
    return message, params


def start_of(settings, body):
    start = ask(ScriptedEngine("x"), settings, **body)[1].guided_decoding.start
    return None if start is None else (start.is_thinking, start.thought_starts, start.calls)


QWEN = {"reasoning_parser": "qwen3"}
R1 = {"reasoning_parser": "deepseek_r1"}
GEMMA = {"reasoning_parser": "gemma4"}
MAY_THINK = (False, ("<think>",), ())
THINKS = (True, (), ())
MAY_CALL = (False, (), ("<tool_call>",))
BOTH = (False, ("<think>",), ("<tool_call>",))


@pytest.mark.parametrize(
    ("settings", "body", "expected"),
    [
        ({}, {"response_format": FORMAT}, None),
        (QWEN, {"response_format": FORMAT}, MAY_THINK),
        (QWEN, {"guided_choice": ["a"]}, MAY_THINK),
        (QWEN, {"tools": [TOOL], "tool_choice": "required"}, MAY_THINK),
        (QWEN, {"tools": [TOOL], "tool_choice": NAMED}, MAY_THINK),
        (R1, {"response_format": FORMAT}, THINKS),
        ({**QWEN, "chat_template": OPEN}, {"response_format": FORMAT}, THINKS),
        ({**R1, "chat_template": CLOSED}, {"response_format": FORMAT}, None),
        (R1, {"guided_regex": "a", "chat_template_kwargs": {"enable_thinking": False}}, None),
        (R1, {"guided_regex": "a", "chat_template_kwargs": {"thinking": False}}, None),
        ({"reasoning_parser": "granite"}, {"guided_regex": "a"}, None),
        (TOOLS, {"tools": [TOOL], "response_format": FORMAT}, MAY_CALL),
        (TOOLS, {"tools": [TOOL], "guided_regex": "a"}, None),
        (TOOLS, {"tools": [TOOL], "tool_choice": "none", "response_format": FORMAT}, None),
        (TOOLS, {"tools": [TOOL], "tool_choice": "required", "response_format": FORMAT}, None),
        (TOOLS, {"tools": [TOOL], "tool_choice": NAMED, "response_format": FORMAT}, None),
        (TOOLS | QWEN, {"tools": [TOOL], "response_format": FORMAT}, BOTH),
    ],
)
def test_the_engine_is_told_where_the_grammar_begins(settings, body, expected):
    if settings.get("reasoning_parser") == "granite":
        expected = (False, ("Here is my thought process:", "Here's my thought process:"), ())
    assert start_of(settings, body) == expected


@pytest.mark.parametrize(
    ("settings", "text", "body", "reasoning", "content"),
    [
        (QWEN, '<think>hm</think>\n\n{"a": 1}', {"response_format": FORMAT}, "hm", '{"a": 1}'),
        (QWEN, '{"a": 1}', {"response_format": FORMAT}, None, '{"a": 1}'),
        ({**QWEN, "chat_template": OPEN}, "hm\n</think>\n\nyes", {}, "hm\n", "\n\nyes"),
        ({**QWEN, "chat_template": OPEN}, "hm", {}, "hm", None),
        ({**R1, "chat_template": CLOSED}, "yes", {}, None, "yes"),
        ({**R1, "chat_template": TEMPLATE + "</think>"}, "yes", {}, None, "yes"),
        (R1, "hm</think> yes", {"guided_choice": ["yes"]}, "hm", "yes"),
        (GEMMA, "<|channel>thought\nhm<channel|>yes", {"guided_choice": ["yes"]}, "hm", "yes"),
        (GEMMA, "<|channel>thought\n<channel|>yes", {"enable_thinking": False}, None, "yes"),
    ],
)
def test_the_prompt_tells_whether_the_output_begins_with_thoughts(
    settings, text, body, reasoning, content
):
    message, _ = ask(ScriptedEngine(*text), settings, **body)
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


@pytest.mark.parametrize(
    ("choice", "text", "calls"),
    [
        ("required", f"<think>hm</think>\n{LIST}", [("f", "{}")]),
        (NAMED, '<think>hm</think>\n{"b": 2}', [("f", '{"b": 2}')]),
        ("auto", f"<think>hm</think>\n{CALL}", [("f", "{}")]),
        ("required", "<think>hm", []),
        (NAMED, "<think>hm", []),
    ],
)
def test_a_model_thinks_before_it_calls(choice, text, calls):
    settings = TOOLS | QWEN
    body = {"tools": [TOOL], "tool_choice": choice, "response_format": FORMAT}
    message, _ = ask(ScriptedEngine(*text), settings, **body)
    assert message["reasoning_content"] == "hm"
    found = [call["function"] for call in message.get("tool_calls") or []]
    assert [(call["name"], call["arguments"]) for call in found] == calls


def test_an_answer_continues_thoughts_that_the_client_began():
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "<think>a"},
    ]
    settings = {**QWEN, "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    more = {"add_generation_prompt": False, "continue_final_message": True}
    message, _ = ask(ScriptedEngine("b</think>c"), settings, messages=messages, **more)
    assert (message["reasoning_content"], message["content"]) == ("b", "c")


MARKERS = ["<tool_call>", "<think>", "</think>", "<|other|>", "<|channel>", "<channel|>"]


class SpecialEngine(ScriptedEngine):
    """An engine whose markers are special tokens, visible only by their flags."""

    def __init__(self, text):
        pieces = [
            piece
            for piece in re.split("(" + "|".join(map(re.escape, MARKERS)) + "|.)", text)
            if piece
        ]
        super().__init__(*(piece for piece in pieces if piece not in MARKERS), *[""] * len(MARKERS))
        self.pieces = pieces
        tokens = [AddedToken(text, special=True, normalized=False) for text in MARKERS]
        self.given_tokenizer.add_tokens(tokens)
        ids = self.given_tokenizer.convert_tokens_to_ids(MARKERS)
        self.ids = dict(zip(MARKERS, ids, strict=True))


@pytest.mark.parametrize("skips", [True, False])
def test_markers_that_are_special_tokens_are_found_and_hidden(skips):
    text = "<think>hm</think>Hi<tool_call> there<think>"
    engine = SpecialEngine(text)
    settings = TOOLS | QWEN
    message, params = ask(engine, settings, tools=[TOOL], skip_special_tokens=skips)
    kept = sorted(engine.ids[t] for t in ("<tool_call>", "<think>", "</think>"))
    assert sorted(params.kept_special_token_ids or []) == (kept if skips else [])
    assert params.skip_special_tokens is skips
    assert message["reasoning_content"] == "hm"
    assert message["content"] == ("Hi there" if skips else "Hi<tool_call> there<think>")
    called, params = ask(SpecialEngine(CALL), settings, tools=[TOOL], response_format=FORMAT)
    assert called["tool_calls"][0]["function"]["name"] == "f" and called["content"] is None
    assert sorted(params.guided_decoding.start.special_tokens) == kept


def test_a_marker_may_be_a_special_token_and_text_after_it():
    message, params = ask(SpecialEngine("<|channel>thought\nhm<channel|>Hi"), GEMMA)
    assert (message["reasoning_content"], message["content"]) == ("hm", "Hi")
    assert len(params.kept_special_token_ids) == 2


def test_without_parsers_no_special_token_is_kept():
    assert ask(SpecialEngine("x"), {})[1].kept_special_token_ids is None


# ---- calls of tools with strict: true ------------------------------------------------------------

STRICT = {"type": "function", "function": {"name": "g", "parameters": SCHEMA, "strict": True}}


def call_schema(name, arguments, key="arguments", name_key="name"):
    return {
        "type": "object",
        "properties": {name_key: {"type": "string", "enum": [name]}, key: arguments},
        "required": [name_key, key],
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("parser", "starts", "key", "is_list"),
    [
        ("hermes", ("<tool_call>",), "arguments", False),
        ("llama3_json", ("<|python_tag|>",), "parameters", False),
        ("granite", ("<|tool_call|>", "<tool_call>"), "arguments", True),
        ("granite-20b-fc", ("<function_call>",), "arguments", False),
        ("internlm", ("<|action_start|><|plugin|>",), "parameters", False),
        ("gigachat3", ("function call<|role_sep|>",), "arguments", False),
        ("jamba", ("<tool_calls>",), "arguments", True),
        ("nemotron_json", ("<TOOLCALL>",), "arguments", True),
        ("mistral", ("[TOOL_CALLS]",), "arguments", True),
    ],
)
def test_calls_of_strict_tools_are_held_to_their_schemas(parser, starts, key, is_list):
    settings = {"enable_auto_tool_choice": True, "tool_call_parser": parser, **QWEN}
    _, params = ask(ScriptedEngine("x"), settings, tools=[TOOL, STRICT])
    guided = params.guided_decoding
    free = call_schema("f", {"type": "object"}, key)
    wanted = {"anyOf": [free, call_schema("g", SCHEMA, key)]}
    assert json.loads(guided.json) == (
        {"type": "array", "minItems": 1, "items": wanted} if is_list else wanted
    )
    assert (guided.field, guided.start.grammar_starts) == ("tools", starts)
    assert guided.start.thought_starts == ("<think>",) and not guided.start.is_thinking
    assert guided.start.calls == (("f", "g") if parser == "mistral" else ())


@pytest.mark.parametrize(
    ("parser", "body"),
    [
        ("hermes", {"tools": [TOOL]}),
        ("hermes", {"tools": [STRICT], "tool_choice": "none"}),
        ("qwen3_coder", {"tools": [STRICT]}),
        ("phi4_mini", {"tools": [STRICT]}),
        ("minimax", {"tools": [STRICT]}),
        ("deepseek_v3", {"tools": [STRICT]}),
    ],
)
def test_other_calls_are_free(parser, body):
    settings = {"enable_auto_tool_choice": True, "tool_call_parser": parser}
    assert ask(ScriptedEngine("x"), settings, **body)[1].guided_decoding is None


def test_a_strict_tool_of_any_api_is_held_and_the_template_does_not_see_it():
    show = "{{ tools | tojson }}" + TEMPLATE
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "tools": [STRICT]},
        "/v1/responses": {"input": "x", "tools": [{"type": "function", **STRICT["function"]}]},
        "/v1/messages": {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 9,
            "tools": [{"name": "g", "input_schema": SCHEMA, "strict": True}],
        },
    }
    for path, body in bodies.items():
        engine = ScriptedEngine("x")
        client = make_client(engine, **TOOLS, chat_template=show)
        answer = client.post(path, json={"model": "", **body})
        assert answer.status_code == 200, answer.text
        [(prompt, params, *_)] = engine.requests.values()
        assert json.loads(params.guided_decoding.json) == call_schema("g", SCHEMA)
        assert "parameters" in prompt and "strict" not in prompt
    wrong = {**bodies["/v1/responses"], "tools": [{"type": "function", "name": "g", "strict": 7}]}
    refused = client.post("/v1/responses", json={"model": "", **wrong})
    assert "strict must be true or false, got 7" in refused.json()["error"]["message"]
