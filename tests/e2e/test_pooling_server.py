"""Test /v1/embeddings and the other pooling routes of a live server with the official client."""

import json
import socket
import threading
from pathlib import Path

import numpy as np
import openai
import pytest
import torch

from tests.e2e.server import start_server
from tests.tiny_pooling_models import (
    add_tokenizer,
    class_logits,
    hidden_states,
    make_pooling_model,
)

pytestmark = pytest.mark.e2e
FLAGS = ("--dtype", "float32", "--max-model-len", "64", "--enable-server-load-tracking")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory):
    """Return (model folder, server) of an embedding model."""
    folder = tmp_path_factory.mktemp("bert")
    add_tokenizer(make_pooling_model("BertModel", folder, matryoshka_dimensions=[16]))
    with start_server(str(folder), *FLAGS) as server:
        yield folder, server


@pytest.fixture
def client(served):
    _, server = served
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    server.wait_until_idle()


def reference(folder: Path, text: str) -> torch.Tensor:
    ids = [2, *(int(word[1:]) for word in text.split()), 3]
    state = hidden_states(folder, "BertModel", ids)[0]
    return torch.nn.functional.normalize(state, dim=0)


@pytest.mark.parametrize("form", [{"encoding_format": "float"}, {}])
def test_embeddings_are_those_of_transformers(form, served, client):
    folder, _ = served
    texts = [" ".join(f"w{10 + i}" for i in range(length)) for length in (1, 7, 60)]
    response = client.embeddings.create(model="", input=texts, **form)
    assert response.usage.prompt_tokens == response.usage.total_tokens == 3 + 9 + 62
    for text, data in zip(texts, response.data, strict=True):
        # If no encoding is given, the client asks for base64 and decodes the answer.
        np.testing.assert_allclose(data.embedding, reference(folder, text), atol=2e-5)


def test_the_client_may_cut_dimensions(client):
    response = client.embeddings.create(model="", input="w7", dimensions=16)
    assert len(response.data[0].embedding) == 16
    with pytest.raises(openai.BadRequestError, match="one of 16, got 8"):
        client.embeddings.create(model="", input="w7", dimensions=8)


def test_many_requests_at_once_get_their_own(served, client):
    folder, _ = served
    found: dict[int, list[float]] = {}

    def ask(number: int) -> None:
        response = client.embeddings.create(model="", input=[f"w{number} w9", f"w{number}"])
        found[number] = response.data[1].embedding

    threads = [threading.Thread(target=ask, args=(10 + i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, got in found.items():
        np.testing.assert_allclose(got, reference(folder, f"w{number}"), atol=2e-5)
    assert len(found) == 32


def test_a_client_that_leaves_ends_its_prompts(served):
    _, server = served
    body = json.dumps({"input": ["w9 " * 60] * 1000}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    server.wait_until_idle()
    assert server.request("GET", "/health")[0] == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/classify"])
def test_what_the_model_cannot_do_is_a_400(path, served):
    _, server = served
    status, _, body = server.request("POST", path, {"prompt": "w7", "input": "w7"})
    assert status == 400 and "task 'embed'" in json.loads(body)["error"]["message"]


# Exhaustive: test_pooling.py tests scores, tests/entrypoints/openai tests the routes.
@pytest.mark.exhaustive
def test_a_cross_encoder_scores_and_ranks(tmp_path):
    architecture = "BertForSequenceClassification"
    add_tokenizer(make_pooling_model(architecture, tmp_path, num_labels=1))
    documents = {"w9": [9], "w5 w6": [5, 6], "w8": [8]}
    want = [
        class_logits(tmp_path, architecture, [2, 7, 3, *ids, 3], [0] * 3 + [1] * (len(ids) + 1))
        .sigmoid()
        .item()
        for ids in documents.values()
    ]
    with start_server(str(tmp_path), *FLAGS) as server:
        pairs = {"text_1": "w7", "text_2": list(documents)}
        scores = json.loads(server.request("POST", "/score", pairs)[2])["data"]
        query = {"query": "w7", "documents": list(documents)}
        ranked = json.loads(server.request("POST", "/rerank", query)[2])["results"]
    assert [entry["score"] for entry in scores] == pytest.approx(want, abs=1e-5)
    assert [entry["index"] for entry in ranked] == sorted(range(3), key=lambda i: -want[i])
