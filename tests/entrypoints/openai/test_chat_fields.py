"""Test any value in any field: the request is served or refused, and the server continues."""

import json

import pytest

from tests.entrypoints.openai.fakes import client_of
from tests.fake_core import FakeCoreLLM
from vllm.entrypoints.openai.chat import serving as serving_chat
from vllm.entrypoints.openai.completion import serving as serving_completion
from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm.entrypoints.openai.protocol.completion import CompletionRequest
from vllm.entrypoints.openai.protocol.tokenization import TokenizeChatRequest
from vllm.entrypoints.openai.routes import tokenization as serving_tokenization

# Values as JSON text: Python's json module also accepts some texts that are not JSON.
VALUES = [
    *("null", "true", "0", "-1", "2", "1.5", "1e30", "-1e999", "NaN", "9" * 30, "-" + "9" * 4200),
    *('""', '"a"', r'"\ud800"', r'"\u0000"', '"' + "x" * 3000 + '"'),
    *("[]", "[null]", "[1]", '["a"]', "[[1]]", "[{}]", "[" * 300 + "]" * 300),
    *("{}", '{"1": 5}', '{"-1": 1e400}', '{"type": "json_object"}', '{"include_usage": null}'),
]
MESSAGES = '[{"role": "user", "content": "a"}]'
ROUTES = [
    ("/v1/chat/completions", ChatCompletionRequest, {"messages": MESSAGES, "max_tokens": "2"}),
    ("/v1/completions", CompletionRequest, {"prompt": '"a"', "max_tokens": "2"}),
    ("/tokenize", TokenizeChatRequest, {"messages": MESSAGES}),
]


@pytest.fixture(scope="module")
def engine():
    return FakeCoreLLM()


@pytest.fixture(scope="module")
def client(engine):
    routers = (serving_chat.router, serving_completion.router, serving_tokenization.router)
    with client_of(engine, *routers) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "name", "advice"),
    [
        ("/v1/completions", "multi_modal_data", "/v1/chat/completions"),
        ("/v1/completions", "mm_processor_kwargs", "/v1/chat/completions"),
        ("/v1/completions", "prompt_token_ids", "as prompt"),
        ("/v1/completions", "sampling_params", "top of the body"),
        ("/v1/chat/completions", "multi_modal_data", "parts of messages"),
        ("/v1/chat/completions", "media_io_kwargs", "--media-io-kwargs"),
        ("/v1/chat/completions", "prompt_embeds", "/v1/completions"),
        ("/tokenize", "multi_modal_uuids", "uuid in the part"),
    ],
)
def test_arguments_of_the_offline_api_are_refused_and_not_ignored(client, path, name, advice):
    (base,) = (fields for route, _, fields in ROUTES if route == path)
    body = {key: json.loads(value) for key, value in base.items()}
    error = client.post(path, json=body | {name: {"image": []}}).json()["error"]
    assert error["param"] == name and advice in error["message"]
    assert client.post(path, json=body | {name: None, "unheard_of": 1}).is_success


@pytest.mark.parametrize(("path", "model", "base"), ROUTES, ids=[path for path, *_ in ROUTES])
def test_any_value_of_any_field_is_served_or_refused_by_name(client, engine, path, model, base):
    headers = {"content-type": "application/json"}
    for index, name in enumerate(model.model_fields):
        if name == "chat_template":
            continue  # a chat template is a program, which test_chat.py tests
        for value in VALUES[index % 3 :: 3]:
            fields = {**base, name: value}
            content = "{" + ",".join(f'"{n}": {v}' for n, v in fields.items()) + "}"
            response = client.post(path, content=content.encode(), headers=headers)
            case = (name, value[:40], response.text[:300])
            assert response.status_code in (200, 400, 404), case
            if response.status_code != 200 and "parsing the body" not in response.text:
                error = response.json()["error"]
                word = name.removeprefix("max_completion_").removeprefix("top_")
                assert word in f"{error['param']} {error['message']}", case
    assert not engine.core.running
    assert client.post(path, json={k: json.loads(v) for k, v in base.items()}).is_success
