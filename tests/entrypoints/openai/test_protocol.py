"""Test that the classes of the package `protocol` describe what the server sends, as a whole and
streamed.
"""

from typing import get_args

import jsonschema
import pytest

from tests.engine.tokenizers_for_tests import byte_level
from tests.entrypoints.openai.fakes import client_of
from tests.entrypoints.openai.sse_reader import chunks_of
from tests.fake_core import FakeCoreLLM
from vllm.entrypoints.anthropic.protocol import MessagesRequest
from vllm.entrypoints.openai import protocol
from vllm.entrypoints.openai.chat.serving import router as chat_router
from vllm.entrypoints.openai.chat.tool_choice import tool_constraint
from vllm.entrypoints.openai.completion.serving import router as completion_router
from vllm.entrypoints.openai.protocol.sampling import guided_decoding
from vllm.entrypoints.pages.web_page import load_page
from vllm.sampling_params import Interface, numbers_of

TOKENIZER = byte_level()
SCRIPT = TOKENIZER("hello, é!", add_special_tokens=False)["input_ids"]
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def describes(model: type, body: dict) -> bool:
    """Check that every field of a body is a field of the model, with a value of the right type."""
    return model.model_validate(body).model_dump(exclude_unset=True) == body


@pytest.mark.parametrize(
    ("router", "path", "fields", "kind"),
    [
        (completion_router, "/v1/completions", {"prompt": "a", "logprobs": 2}, "Completion"),
        (
            chat_router,
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2},
            "ChatCompletion",
        ),
    ],
)
def test_the_bodies_of_completions_are_those_of_the_classes(router, path, fields, kind):
    engine = FakeCoreLLM(lambda request: [*SCRIPT, TOKENIZER.eos_token_id])
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with client_of(engine, router) as client:
        whole = client.post(path, json=fields).json()
        chunks = chunks_of(client.post(path, json=fields | options).text)
    assert describes(getattr(protocol, f"{kind}Response"), whole)
    assert len(chunks) > 2
    for chunk in chunks:
        assert describes(getattr(protocol, f"{kind}StreamResponse"), chunk)


def test_calls_of_tools_are_those_of_the_classes():
    script = TOKENIZER(CALL, add_special_tokens=False)["input_ids"]
    engine = FakeCoreLLM(lambda request: [*script, TOKENIZER.eos_token_id])
    fields = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS}
    args = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with client_of(engine, chat_router, **args) as client:
        whole = client.post("/v1/chat/completions", json=fields).json()
        chunks = chunks_of(
            client.post("/v1/chat/completions", json={**fields, "stream": True}).text
        )
    assert whole["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
    assert describes(protocol.ChatCompletionResponse, whole)
    assert any(choice["delta"].get("tool_calls") for c in chunks for choice in c["choices"])
    assert all(describes(protocol.ChatCompletionStreamResponse, chunk) for chunk in chunks)


@pytest.mark.parametrize("name", numbers_of(Interface.API))
def test_a_sampling_parameter_is_a_field_of_every_body(name):
    bodies = (
        *(protocol.CompletionRequest, protocol.ChatCompletionRequest),
        *(protocol.ResponsesRequest, protocol.TranscriptionRequest),
    )
    assert [body.__name__ for body in bodies if name not in body.model_fields] == []


@pytest.mark.parametrize("name", numbers_of(Interface.PAGE))
def test_a_sampling_parameter_has_a_field_on_the_chat_page(name):
    page = load_page("chat").body.decode()
    assert page.count(f'<input id="{name}" data-setting="{name}" type="number" ') == 1


def test_the_chat_page_bounds_a_field_as_the_server_does():
    page = load_page("chat").body.decode()
    assert (
        '<label for="min_p">Min p</label>\n<input id="min_p" data-setting="min_p" type="number" '
        'min="0" max="1" step="any" inputmode="decimal">' in page
    )
    assert '<input id="seed" data-setting="seed" type="number" step="1">' in page


BODIES = {
    protocol.ChatCompletionRequest: {"messages": [{"role": "user", "content": "a"}]},
    protocol.CompletionRequest: {"prompt": "a"},
    protocol.EmbeddingRequest: {"input": "a"},
    protocol.RerankRequest: {"query": "a", "documents": ["b"]},
    protocol.ScoreRequest: {"text_1": "a", "text_2": "b"},
    protocol.ClassificationRequest: {"input": "a"},
    protocol.TokenizeChatRequest: {"messages": [{"role": "user", "content": "a"}]},
    protocol.TokenizeCompletionRequest: {"prompt": "a"},
    protocol.ResponsesRequest: {"input": "a"},
    MessagesRequest: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_client_may_send_null_for_every_optional_field(kind):
    fields = {field.alias or name: name for name, field in kind.model_fields.items()}
    nulls = {key: None for key, name in fields.items() if not kind.model_fields[name].is_required()}
    plain = kind.model_validate(BODIES[kind])
    found = kind.model_validate({**nulls, **BODIES[kind]})
    for name in fields.values():
        field = kind.model_fields[name]
        if name not in BODIES[kind] and type(None) not in get_args(field.annotation):
            assert getattr(found, name) == getattr(plain, name) or name == "request_id", name


TREE = {
    "type": "object",
    "properties": {
        "name": {"$ref": "#/$defs/Name"},
        "same": {"$ref": "#/properties/name"},
        "children": {"type": "array", "items": {"$ref": "#"}},
    },
    "required": ["name"],
    "$defs": {"Name": {"type": "string", "maxLength": 3}},
}


@pytest.mark.parametrize("others", [0, 1, 11])
@pytest.mark.parametrize(
    ("arguments", "is_right"),
    [
        ({"name": "a", "children": [{"name": "b", "same": "c", "children": []}]}, True),
        ({"name": "a", "children": [{"children": []}]}, False),
        ({"name": "a", "children": [{"name": "long"}]}, False),
        ({"name": "a", "same": "long"}, False),
    ],
)
def test_references_of_a_tool_are_to_its_own_schema(others, arguments, is_right):
    functions = [{"name": f"f{i}", "parameters": {"type": "array"}} for i in range(others)]
    functions.append({"name": "tree", "parameters": TREE})
    request = protocol.ChatCompletionRequest(
        messages=[{"role": "user", "content": "a"}],
        tools=[{"type": "function", "function": function} for function in functions],
        tool_choice="required",
    )
    schema = tool_constraint(request).json
    calls = [{"name": "tree", "parameters": arguments}]
    assert jsonschema.Draft202012Validator(schema).is_valid(calls) == is_right


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}, SCHEMA),
        ({"type": "json_schema", "name": "a", "schema": SCHEMA}, SCHEMA),
        ({"type": "json_object", "schema": SCHEMA}, SCHEMA),
        ({"type": "json_object"}, None),
        ({"type": "json_object", "schema": None}, None),
    ],
)
def test_a_response_format_may_have_its_schema_where_other_servers_have_it(wanted, expected):
    request = protocol.CompletionRequest(prompt="a", response_format=wanted)
    guided = guided_decoding(request)
    assert (guided.json, guided.json_object) == (expected, None if expected else True)
