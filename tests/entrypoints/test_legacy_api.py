"""Test POST /generate, which old clients use."""

import json

import pytest
from starlette.testclient import TestClient

from tests.entrypoints.openai.server_fakes import make_app
from vllm.entrypoints.api_server import router
from vllm.errors import RequestError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind


def output(*texts, finished):
    samples = [
        CompletionOutput(i, text, [1], cumulative_logprob=None, logprobs=None)
        for i, text in enumerate(texts)
    ]
    return RequestOutput("r", "def", [1], None, samples, finished)


@pytest.fixture
def client():
    app, context = make_app(max_n=2, max_stop_strings=1)
    app.include_router(router)

    async def generate(prompt, params, request_id):
        context.params = params
        if prompt == "bad":
            raise RequestError("no such token")
        if params.output_kind is RequestOutputKind.CUMULATIVE:
            yield output(" f", finished=False)
            if prompt == "late":
                raise RequestError("gone wrong")
        yield output(" f(x)", " g(x)", finished=True)

    context.engine.generate = generate
    with TestClient(app, raise_server_exceptions=False) as client:
        client.context = context
        yield client


def test_the_answer_is_the_prompt_with_each_output(client):
    response = client.post("/generate", json={"prompt": "def", "n": 2, "temperature": 0.5})
    assert response.json() == {"text": ["def f(x)", "def g(x)"]}
    assert (client.context.params.n, client.context.params.temperature) == (2, 0.5)


def test_token_ids_are_the_names_of_a_json_object(client):
    fields = {"logit_bias": {"5": 1.5}, "seed": None}
    response = client.post("/generate", json={"prompt": "def", **fields})
    assert response.status_code == 200, response.text
    assert (client.context.params.logit_bias, client.context.params.seed) == ({5: 1.5}, None)


def test_a_stream_has_one_object_per_line(client):
    response = client.post("/generate", json={"prompt": "def", "stream": True})
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert lines == [{"text": ["def f"]}, {"text": ["def f(x)", "def g(x)"]}]
    assert response.headers["content-type"] == "application/x-ndjson"


def test_a_stream_that_fails_ends_with_the_error(client):
    first = client.post("/generate", json={"prompt": "bad", "stream": True})
    assert first.status_code == 400 and first.json()["error"]["message"] == "no such token"
    late = client.post("/generate", json={"prompt": "late", "stream": True})
    assert late.status_code == 200
    assert json.loads(late.text.splitlines()[-1])["error"]["message"] == "gone wrong"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "JSON object"),
        ("{}", "prompt must be"),
        ('{"prompt": 3}', "prompt must be"),
        ('{"prompt": "a", "stream": 1}', "stream must be"),
        ('{"prompt": "a", "nonsense": 1}', "unknown field 'nonsense'"),
        ('{"prompt": "a", "logits_processors": []}', "unknown field 'logits_processors'"),
        ('{"prompt": "a", "top_k": "x"}', "top_k"),
        ('{"prompt": "a", "temperature": -1}', "temperature"),
        ('{"prompt": "a", "n": 3}', "n: 3 outputs are more than this server accepts, at most 2"),
        ('{"prompt": "a", "stop": ["x", "y"]}', "--max-stop-strings"),
    ],
)
def test_a_body_that_is_wrong_is_refused_by_name(client, body, message):
    response = client.post("/generate", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
