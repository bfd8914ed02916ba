"""Test tools whose input is text, and `tool_choice` with a list of tools, in chat and responses."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from tests.entrypoints.openai.fakes import client_of
from tests.entrypoints.openai.test_chat import AUTO, TOOLS, chat, engine_that_says, stream
from vllm.entrypoints.openai.chat.custom_calls import InputReader
from vllm.entrypoints.openai.chat.serving import router as chat_router
from vllm.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest
from vllm.entrypoints.openai.responses.request import as_chat_request
from vllm.entrypoints.openai.responses.serving import router as responses_router
from vllm.entrypoints.openai.shared.response_items import as_messages, read_input
from vllm.errors import RequestError
from vllm.utils.text.json_words import show_value

REGEX = {"type": "grammar", "grammar": {"syntax": "regex", "definition": r"\d+"}}
LARK = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"+'}}
INPUT = 'SELECT "Łódź" \\ 😀\n'


def custom(name="sql", **more):
    return {"type": "custom", "custom": {"name": name, **more}}


def hermes(name, arguments):
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def required(name, arguments):
    return json.dumps([{"name": name, "parameters": arguments}])


NAMED = custom()
ESCAPED = {"input": INPUT}


@pytest.mark.parametrize("how", ["whole", "streamed"])
@pytest.mark.parametrize(
    ("text", "fields", "reason"),
    [
        (INPUT, {"tool_choice": NAMED}, "stop"),
        (INPUT, {"tool_choice": "required"}, "tool_calls"),
        (hermes("sql", ESCAPED), {"tool_choice": "auto"}, "tool_calls"),
        (required("sql", ESCAPED), {"tool_choice": "required", "more": TOOLS}, "tool_calls"),
    ],
    ids=["named", "alone", "auto", "required"],
)
def test_a_call_has_the_input_as_text(how, text, fields, reason):
    tools = [custom(description="runs"), *fields.get("more", [])]
    fields = {"tool_choice": fields["tool_choice"], "tools": tools}
    with client_of(engine_that_says(text), chat_router, **AUTO) as client:
        if how == "whole":
            choice = ChatCompletion.model_validate(chat(client, **fields)).choices[0]
            [call] = choice.message.tool_calls
            assert (call.type, call.custom.name, call.custom.input) == ("custom", "sql", INPUT)
            assert choice.finish_reason == reason
            return
        chunks = stream(client, **fields)
    for chunk in chunks:
        ChatCompletionChunk.construct(**chunk)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert (calls[0]["type"], calls[0]["custom"]["name"]) == ("custom", "sql")
    assert all("function" not in call for call in calls)
    assert "".join(call["custom"]["input"] for call in calls) == INPUT
    assert len(calls) > 3, "it comes as it grows"
    assert chunks[-1]["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"tool_choice": NAMED}, None, None),
        ({"tool_choice": NAMED, "format": {"type": "text"}}, None, None),
        ({"tool_choice": NAMED, "format": REGEX}, "regex", r"\d+"),
        ({"tool_choice": NAMED, "format": LARK}, "grammar", 'start: "a"+'),
        ({"tool_choice": "required", "format": LARK}, "grammar", 'start: "a"+'),
    ],
)
def test_the_grammar_of_a_tool_that_must_be_called_constrains_the_output(fields, kind, value):
    engine = engine_that_says("1")
    more = {"format": fields["format"]} if "format" in fields else {}
    with client_of(engine, chat_router) as client:
        chat(client, tools=[custom(**more)], tool_choice=fields["tool_choice"])
    guided = engine.seen[0][1].guided_decoding
    assert guided is None if kind is None else getattr(guided, kind) == value


def test_a_regex_holds_also_among_several_tools():
    engine = engine_that_says(required("sql", {"input": "12"}))
    with client_of(engine, chat_router) as client:
        chat(client, tools=[custom(format=REGEX), *TOOLS], tool_choice="required")
    [first, *_] = json.loads(engine.seen[0][1].guided_decoding.json)["items"]["anyOf"]
    assert first["properties"]["parameters"]["properties"]["input"]["pattern"] == r"^(?:\d+)$"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tools": [custom(format=REGEX)]}, hermes("sql", {"input": "any"})),
        ({"tools": [custom(format=LARK), *TOOLS]}, hermes("sql", {"input": "any"})),
        (
            {"tools": [custom(format=LARK), *TOOLS], "tool_choice": "required"},
            required("sql", {"input": "any"}),
        ),
    ],
)
def test_a_grammar_that_cannot_hold_leaves_the_input_free(fields, text):
    with client_of(engine_that_says(text), chat_router, **AUTO) as client:
        choice = ChatCompletion.model_validate(chat(client, **fields)).choices[0]
    [call] = choice.message.tool_calls
    assert (call.type, call.custom.input) == ("custom", "any")


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
def test_tools_of_other_servers_are_left_out(choice):
    foreign = [{"type": "web_search"}, {"type": "mcp", "server_label": "s"}]
    with client_of(engine_that_says(hermes("sql", ESCAPED)), chat_router, **AUTO) as client:
        found = chat(client, tools=[*foreign, custom()], web_search_options={}, **choice)
        alone = chat(client, tools=foreign, **choice)
    assert found["choices"][0]["message"]["tool_calls"][0]["custom"]["input"] == INPUT
    assert alone["choices"][0]["message"]["tool_calls"] == []


IDS = {
    "mistral": "[a-zA-Z0-9]{9}",
    "kimi_k2": r"functions\.\w+:1",
    "hermes": "chatcmpl-tool-.*",
    None: "chatcmpl-tool-.*",
}


@pytest.mark.parametrize("parser", IDS)
@pytest.mark.parametrize(
    ("text", "choice"),
    [
        (INPUT, NAMED),
        ('{"place": "x"}', {"type": "function", "function": {"name": "wait"}}),
        (required("wait", {}), "required"),
    ],
)
def test_the_id_of_a_call_that_has_to_be_made_is_of_the_form_of_the_parser(parser, text, choice):
    flags = {} if parser is None else {**AUTO, "tool_call_parser": parser}
    earlier = {"id": "a", "type": "function", "function": {"name": "wait", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [earlier]},
        {"role": "user", "content": "y"},
    ]
    with client_of(engine_that_says(text), chat_router, **flags) as client:
        answer = chat(client, tools=[custom(), *TOOLS], tool_choice=choice, messages=messages)
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert re.fullmatch(IDS[parser], call["id"])


F = {"name": "f", "description": "d", "parameters": {"type": "object"}}
DIALECTS = [
    # The Responses API: a tool is one flat object.
    ({"type": "function", **F, "strict": False}, {"type": "function", "name": "f"}, "f"),
    ({**custom("g")["custom"], "type": "custom"}, {"type": "custom", "name": "g"}, "g"),
    (
        {"type": "custom", "name": "g", "format": {"type": "grammar", **LARK["grammar"]}},
        {"type": "custom", "custom": {"name": "g"}},
        "g",
    ),
    # Anthropic: the schema is `input_schema`, and words are objects.
    ({"name": "f", "input_schema": F["parameters"]}, {"type": "tool", "name": "f"}, "f"),
    ({"type": "custom", "name": "f", "input_schema": None}, {"type": "tool", "name": "f"}, "f"),
    ({"name": "f", "input_schema": {}}, {"type": "any"}, "required"),
    ({"type": "function", "function": F}, {"type": "auto"}, "auto"),
    ({"type": "function", "function": F}, {"type": "none"}, "none"),
    # Mistral
    ({"type": "function", "function": F}, "any", "required"),
]


@pytest.mark.parametrize(("tool", "choice", "read"), DIALECTS, ids=lambda v: str(v)[:60])
def test_tools_and_choices_in_the_forms_of_other_apis_are_read(tool, choice, read):
    messages = [{"role": "user", "content": "x"}]
    body = ChatCompletionRequest(messages=messages, tools=[*TOOLS, tool], tool_choice=choice)
    assert (body.named_tool or body.tool_choice) == read
    [*_, last] = body.function_tools
    assert last.function.name in ("f", "g")
    is_text = last.function.name == "g"
    assert bool(body.custom_tools) == is_text
    if is_text and "format" in tool:
        assert body.custom_tools["g"].grammar.syntax == "lark"


REFUSED = [
    (
        {"tools": TOOLS, "tool_choice": {"type": "web_search"}},
        "tool_choice",
        'tool_choice.type must be function, custom, allowed_tools, got "web_search", which',
    ),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "needs tools"),
    (
        {
            "tools": TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "web_search"}]},
            },
        },
        "tool_choice",
        "must have a function or a custom tool",
    ),
    ({"tools": [custom(format={"type": "grammar"})]}, "tools", "needs grammar with syntax and"),
    ({"tools": [custom(), custom()]}, "tools", 'two tools have the name "sql"'),
    ({"tools": [custom(name="")]}, "tools", "name"),
    *[
        (
            {"tools": [*TOOLS, {"type": kind, "function": {"name": "f"}}]},
            "tools",
            f"tools.2.type must be a string such as function or custom, got {show_value(kind)}",
        )
        for kind in (7, "", [1])
    ],
    ({"tools": [custom()], "tool_choice": custom("x")}, "tool_choice", "no custom tool has the"),
    (
        {
            "tools": [custom()],
            "tool_choice": {"type": "function", "function": {"name": "sql"}},
        },
        "tool_choice",
        '"sql" is a custom tool: name it with',
    ),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "allowed_tools"),
    (
        {
            "tools": TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [custom("look")]},
            },
        },
        "tool_choice",
        "allowed_tools.tools[0] must name a custom tool of the request",
    ),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED, ids=lambda v: str(v)[:40])
def test_what_cannot_be_is_refused_by_its_name(fields, param, message):
    with client_of(engine_that_says("x"), chat_router, **AUTO) as client:
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"].startswith(param)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_the_allowed_tools_are_known_to_the_model(mode):
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "wait"}}, NAMED]}
    flat = [{"type": "function", "name": "wait"}, {"type": "custom", "name": "sql"}]
    # In the form of the chat API and of the Responses API, both in both routes.
    for choice in ({"allowed_tools": allowed}, {"mode": mode, "tools": flat}):
        choice = {"type": "allowed_tools", **choice}
        tools = [*TOOLS, custom()]
        chat_body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
        of_chat = ChatCompletionRequest.model_validate({**chat_body, "tool_choice": choice})
        response = ResponsesRequest.model_validate(
            {"input": "hi", "tools": tools, "tool_choice": choice}
        )
        for body in (of_chat, as_chat_request(response, chat_body["messages"])):
            assert body.tool_choice == mode
            assert [tool.function.name for tool in body.function_tools] == ["wait", "sql"]


def test_a_conversation_with_a_custom_call_goes_on():
    call = {"id": "c1", "type": "custom", "custom": {"name": "sql", "input": "SELECT 1"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    ]
    engine = engine_that_says("ok")
    template = "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls or [] %}"
    template += "[{{ c.function.name }}:{{ c.function.arguments.input }}]{% endfor %}{% endfor %}"
    with client_of(engine, chat_router, chat_template=template) as client:
        chat(client, messages=messages)
        broken = {**call, "custom": {"name": "sql"}}
        body = {"messages": [{"role": "assistant", "tool_calls": [broken]}]}
        refused = client.post("/v1/chat/completions", json=body)
    prompt = engine.tokenizer.decode(engine.seen[0][0]["prompt_token_ids"])
    assert "[sql:SELECT 1]" in prompt
    assert "custom must have a name and an input" in refused.json()["error"]["message"]


# ---- responses --------------------------------------------------------------------------------

FLAT = {"type": "custom", "name": "sql", "description": "runs"}


@pytest.mark.parametrize("how", ["whole", "streamed"])
@pytest.mark.parametrize(
    ("text", "choice"),
    [
        (INPUT, {"type": "custom", "name": "sql"}),
        (hermes("sql", ESCAPED), "auto"),
        (hermes("sql", ESCAPED), {"type": "allowed_tools", "mode": "auto", "tools": [FLAT]}),
    ],
    ids=["named", "auto", "allowed"],
)
def test_a_response_has_a_custom_tool_call(how, text, choice):
    body = {"input": "hi", "tools": [FLAT], "tool_choice": choice, "stream": how == "streamed"}
    with client_of(engine_that_says(text), responses_router, **AUTO) as client:
        answer = client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    if how == "whole":
        [item] = Response.model_validate(answer.json()).output
        assert (item.type, item.name, item.input) == ("custom_tool_call", "sql", INPUT)
        return
    events = [json.loads(e.partition("data: ")[2]) for e in answer.text.split("\n\n") if "{" in e]
    of = "response.custom_tool_call_input"
    assert "".join(e["delta"] for e in events if e["type"] == f"{of}.delta") == INPUT
    assert [e["input"] for e in events if e["type"] == f"{of}.done"] == [INPUT]
    assert Response.model_validate(events[-1]["response"]).output[0].input == INPUT


def test_items_of_custom_calls_become_messages():
    items = read_input(
        [
            {"type": "custom_tool_call", "call_id": "c", "name": "sql", "input": "SELECT 1"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "1"},
        ]
    )
    assert items[0]["id"].startswith("ctc_")
    called, answered = as_messages(None, items)
    assert called["tool_calls"][0]["custom"] == {"name": "sql", "input": "SELECT 1"}
    assert answered == {"role": "tool", "tool_call_id": "c", "name": "sql", "content": "1"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{**FLAT, "format": {"type": "x"}}]}, r"tools\[0\]\.format must be"),
        ({"tools": [{**FLAT, "format": {"type": "grammar"}}]}, r"format\.syntax must be lark or"),
        ({"tools": [FLAT], "tool_choice": {"type": "custom", "name": "x"}}, 'the custom "x"'),
        ({"tools": [FLAT], "tool_choice": {"type": "function", "name": "sql"}}, "the function"),
        (
            {
                "tools": [FLAT],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "custom", "name": "x"}],
                },
            },
            'allows the custom "x"',
        ),
        ({"tools": [{"type": 7}]}, "must be a string such as function or custom, got 7"),
    ],
)
def test_a_response_refuses_what_is_wrong_by_its_name(fields, message):
    request = ResponsesRequest.model_validate({"input": "hi", **fields})
    with pytest.raises(RequestError, match=message):
        as_chat_request(request, [{"role": "user", "content": "hi"}])


# ---- the input in the arguments ---------------------------------------------------------------


def read(text: str, cuts: list[int]) -> str:
    reader, pieces, start = InputReader(), [], 0
    for cut in sorted({min(cut, len(text)) for cut in cuts} | {len(text)}):
        pieces.append(reader.feed(text[start:cut]))
        start = cut
    return "".join(pieces) + reader.finish()


@given(st.text(), st.lists(st.integers(0, 60)), st.booleans(), st.sampled_from(["", " ", "\n"]))
def test_any_input_is_decoded_however_it_is_cut(text, cuts, ascii_only, space):
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only).replace('{"input":', "", 1)
    arguments = f'{{{space}"input"{space}:{space}{arguments}'
    assert read(arguments, cuts) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"query": "a"}', '{"query": "a"}'),
        ('{"input": 3}', '{"input": 3}'),
        ('{"input": "a", "b": 1}', "a"),
        ('{"input": "cut o', "cut o"),
        ('{"input": "cut \\u00', "cut "),
        (r'{"input": "\d+ \ud83d \udc00"}', "\\d+ \ufffd \ufffd"),
        ("{}", ""),
        ("", ""),
        ("SELECT 1", "SELECT 1"),
    ],
)
def test_arguments_of_another_form_are_not_lost(arguments, text):
    for cuts in ([], list(range(len(arguments)))):
        assert read(arguments, cuts) == text


def test_white_space_before_an_input_is_looked_at_once():
    # The reader once took minutes for this text, and blocked all other requests.
    reader = InputReader()
    assert {reader.feed("\n\n\n\n") for _ in range(50_000)} == {""}
    assert reader.feed('{\n"input": "a') + reader.feed('b"}') + reader.finish() == "ab"
