"""Test POST /tokenize, POST /detokenize and GET /v1/models."""

import re

import pytest

from tests.entrypoints.openai.fakes import MODEL, client_of
from tests.fake_core import FakeCoreLLM
from vllm.entrypoints.openai.routes import (
    models as serving_models,
)
from vllm.entrypoints.openai.routes import (
    tokenization as serving_tokenization,
)

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client():
    routers = (serving_models.router, serving_tokenization.router)
    with client_of(FakeCoreLLM(), *routers) as client:
        yield client


def test_a_text_is_tokenised_as_a_completion_and_back(client):
    body = client.post("/tokenize", json={"prompt": "a b", "return_token_strs": True}).json()
    assert (body["count"], body["max_model_len"]) == (3, 256)
    assert body["token_strs"][0] == "<s>"
    bare = client.post("/tokenize", json={"prompt": "a b", "add_special_tokens": False}).json()
    assert bare["tokens"] == body["tokens"][1:]
    assert bare["token_strs"] is None
    text = client.post("/detokenize", json={"tokens": bare["tokens"]}).json()
    assert text == {"prompt": "a b"}
    assert client.post("/tokenize", json={"prompt": ""}).json()["tokens"] == body["tokens"][:1]
    nothing = client.post("/tokenize", json={"prompt": "", "add_special_tokens": False}).json()
    assert (nothing["count"], nothing["tokens"]) == (0, [])


def test_a_conversation_has_its_special_tokens_once(client):
    body = client.post("/tokenize", json={"messages": MESSAGES}).json()
    text = client.post("/detokenize", json={"tokens": body["tokens"]}).json()["prompt"]
    assert text == "<s><|user|>hi<|end|><|assistant|>"
    options = {"add_generation_prompt": False}
    shorter = client.post("/tokenize", json={"messages": MESSAGES, **options}).json()
    assert shorter["count"] == body["count"] - 1


def test_many_tokens_become_text_too(client):
    tokens = client.post("/tokenize", json={"prompt": "word " * 9000}).json()["tokens"]
    text = client.post("/detokenize", json={"tokens": tokens[1:]}).json()["prompt"]
    assert text == "word " * 9000


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"messages": "x"}, 400, "messages"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": MESSAGES, "continue_final_message": True}, 400, "continue"),
        ("/tokenize", {"prompt": "a", "model": "x"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": "abc"}, 400, "tokens"),
    ],
)
def test_what_is_wrong_is_refused_by_name(client, path, body, status, param):
    response = client.post(path, json=body)
    assert response.status_code == status
    assert response.json()["error"]["param"].startswith(param)


def test_models_are_listed(client):
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 256)
    assert card["permission"][0]["allow_sampling"]
    assert client.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
    missing = client.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["message"] == "The model `org/other` does not exist."


def test_models_are_listed_in_the_format_of_the_client(client):
    anthropic = {"anthropic-version": "2023-06-01"}
    found = client.get("/v1/models", headers=anthropic).json()
    (card,) = found.pop("data")
    assert found == {"first_id": MODEL, "last_id": MODEL, "has_more": False}
    assert (card["type"], card["id"], card["display_name"]) == ("model", MODEL, MODEL)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", card["created_at"])
    assert client.get(f"/v1/models/{MODEL}", headers=anthropic).json() == card
