"""Test one conversation over every API: the model gets the same text."""

import pytest

from tests.entrypoints.openai.scripted_engine import ScriptedEngine, make_client

TEMPLATE = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
    "{{ '<' + m.role + '>' + m['content'] }}"
    "{% for c in m.tool_calls %}{{ '[' + c.function.name + c.function.arguments + ']' }}"
    "{% endfor %}{% elif m.role == 'tool' %}{{ '<' + m['name'] + '>' + m['content'] }}{% endif %}"
    "{% endfor %}"
)
"""Drops unknown roles, appends content and arguments, and needs the name of a result."""
PROMPT = '<system>brief<user>add<assistant>[add{"a": 1}]<add>2'

CHAT = [
    {"role": "developer", "content": "brief"},
    {"role": "user", "content": [{"type": "text", "text": "add"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "2"}]},
]
ITEMS = [
    {"role": "developer", "content": "brief"},
    {"role": "user", "content": [{"type": "input_text", "text": "add"}]},
    {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
    {"type": "function_call_output", "call_id": "c", "output": "2"},
]
TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "add"}]},
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "2"}]},
]


BY_SERVER = {"chat_template": TEMPLATE}


@pytest.mark.parametrize(
    ("path", "body", "settings"),
    [
        ("/v1/chat/completions", {"messages": CHAT}, BY_SERVER),
        ("/v1/chat/completions", {"messages": CHAT, "chat_template": TEMPLATE}, {}),
        ("/v1/responses", {"input": ITEMS}, BY_SERVER),
        ("/v1/messages", {"system": "brief", "messages": TURNS, "max_tokens": 9}, BY_SERVER),
        ("/tokenize", {"messages": CHAT}, BY_SERVER),
        ("/tokenize", {"messages": CHAT, "chat_template": TEMPLATE}, {}),
    ],
)
def test_every_api_makes_the_same_text(path, body, settings):
    engine = ScriptedEngine("x")
    response = make_client(engine, **settings).post(path, json=body)
    assert response.status_code == 200, response.text
    if path == "/tokenize":
        text = engine.tokenizer.decode(response.json()["tokens"])
    else:
        [(text, _)] = engine.requests.values()
    assert text == PROMPT


def test_a_call_that_was_cut_does_not_end_the_conversation():
    engine = ScriptedEngine('[{"name": "add", "parameters": {"text": "a')
    engine.finish_reason = "length"
    client = make_client(engine, chat_template=TEMPLATE)
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    fields = {"tools": [tool], "tool_choice": "required"}
    first = client.post("/v1/responses", json={"input": "hi", **fields}).json()
    [call] = first["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "no"}
    stored = {"previous_response_id": first["id"], "input": [output]}
    sent = {"input": [{"role": "user", "content": "hi"}, call, output]}
    for body in (stored, sent):
        assert client.post("/v1/responses", json=body).status_code == 200
    texts = [text for text, _ in engine.requests.values()]
    assert texts[1:] == ['<user>hi<assistant>[add{"text": "a]<add>no'] * 2


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": CHAT[1:2]}, "messages"),
        ("/v1/responses", {"input": "hi"}, "input"),
    ],
)
def test_what_the_template_refuses_names_the_field_of_the_api(path, body, param):
    client = make_client(ScriptedEngine("x"), chat_template="{{ raise_exception('not so') }}")
    response = client.post(path, json=body)
    assert response.status_code == 400
    assert "not so" in response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ('[{"name": "add", "parameters": {}}]', "required"),
        ("{}", {"type": "function", "function": {"name": "add"}}),
        ('[TOOL_CALLS][{"name": "add", "arguments": {}}]', "auto"),
    ],
)
def test_ids_of_calls_have_the_form_of_the_parser_for_every_tool_choice(text, choice):
    settings = {"enable_auto_tool_choice": True, "tool_call_parser": "mistral"}
    body = {
        "messages": CHAT[1:2],
        "tools": [{"type": "function", "function": {"name": "add"}}],
        "tool_choice": choice,
    }
    client = make_client(ScriptedEngine(text), **settings)
    response = client.post("/v1/chat/completions", json=body).json()
    [call] = response["choices"][0]["message"]["tool_calls"]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()
