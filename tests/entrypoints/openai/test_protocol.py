"""Test that the classes of the package `protocol` describe what the server sends, as a whole and
streamed.
"""

import pytest

from tests.engine.tokenizers_for_tests import byte_level
from tests.entrypoints.openai.fakes import client_of
from tests.entrypoints.openai.sse_reader import chunks_of
from tests.fake_core import FakeCoreLLM
from vllm.entrypoints.openai import protocol
from vllm.entrypoints.openai.chat.serving import router as chat_router
from vllm.entrypoints.openai.completion.serving import router as completion_router
from vllm.entrypoints.pages.web_page import load_page
from vllm.sampling_params import Door, numbers_at

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


@pytest.mark.parametrize("name", numbers_at(Door.API))
def test_a_sampling_parameter_is_a_field_of_every_body(name):
    bodies = (
        *(protocol.CompletionRequest, protocol.ChatCompletionRequest),
        *(protocol.ResponsesRequest, protocol.TranscriptionRequest),
    )
    assert [body.__name__ for body in bodies if name not in body.model_fields] == []


@pytest.mark.parametrize("name", numbers_at(Door.PAGE))
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
