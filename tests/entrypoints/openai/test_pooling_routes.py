"""Test /v1/embeddings, /pooling, /classify, /score and /rerank: shapes, usage, errors."""

import base64
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.entrypoints.openai.pooling_engine import make_pooling_client
from tests.loops import loop_over
from tests.tiny_pooling_models import add_tokenizer, make_pooling_model
from vllm import LLM

SETTINGS: dict[str, Any] = {"max_batch_prompts": 8, "enable_prompt_tokens_details": True}
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def load(architecture: str, folder: Path, **overrides: Any) -> LLM:
    add_tokenizer(make_pooling_model(architecture, folder, **overrides))
    return LLM(str(folder), dtype="float32", max_model_len=64, served_model_name=["tiny"])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LLM]:
    def make(architecture: str, **overrides: Any) -> LLM:
        return load(architecture, tmp_path_factory.mktemp(architecture), **overrides)

    return {
        "embed": make("BertModel", matryoshka_dimensions=[16]),
        "classify": make(
            "BertForSequenceClassification", id2label={0: "good", 1: "bad", 2: "ugly"}
        ),
        "score": make("BertForSequenceClassification", num_labels=1),
        "reward": make("Qwen2ForRewardModel"),
        "generate": make("Qwen2ForCausalLM"),
    }


@pytest.fixture
def post(models):
    def send(kind: str, path: str, status: int = 200, headers: Any = None, **body: Any) -> Any:
        client, _ = make_pooling_client(models[kind], **SETTINGS)
        response = client.post(path, json=body, headers=headers)
        assert response.status_code == status, response.text
        return response.json()

    return send


def embedding(models: dict[str, LLM], prompt: Any) -> list[float]:
    (output,) = models["embed"].embed(prompt, use_tqdm=False)
    return output.outputs.embedding


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("w7 w8", ["w7 w8"]),
        (["w7", "w8 w9"], ["w7", "w8 w9"]),
        (["w7", ""], ["w7", [2, 3]]),
        ([2, 7, 3], [[2, 7, 3]]),
        ([[2, 7, 3], [2, 8, 9, 3]], [[2, 7, 3], [2, 8, 9, 3]]),
    ],
)
def test_embeddings_of_every_form_of_input(given, prompts, post, models):
    body = post("embed", "/v1/embeddings", input=given, model="tiny")
    assert (body["object"], body["model"], body["id"][:5]) == ("list", "tiny", "embd-")
    assert [(d["index"], d["object"]) for d in body["data"]] == [
        (index, "embedding") for index in range(len(prompts))
    ]
    for data, prompt in zip(body["data"], prompts, strict=True):
        np.testing.assert_allclose(data["embedding"], embedding(models, prompt), atol=1e-6)
    lengths = [len(p) if isinstance(p, list) else len(p.split()) + 2 for p in prompts]
    assert body["usage"] == {
        "prompt_tokens": sum(lengths),
        "total_tokens": sum(lengths),
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize(("path", "key"), [("/v1/embeddings", "embedding"), ("/pooling", "data")])
def test_base64_is_float32(path, key, post, models):
    (data,) = post("embed", path, input="w7", encoding_format="base64")["data"]
    numbers = np.frombuffer(base64.b64decode(data[key]), "<f4")
    np.testing.assert_allclose(numbers, embedding(models, "w7"), atol=1e-6)


def test_special_tokens_may_be_left_out_and_long_inputs_cut(post):
    plain = post("embed", "/v1/embeddings", input="w7", add_special_tokens=False)
    cut = post("embed", "/v1/embeddings", input="w7 " * 99, truncate_prompt_tokens=5)
    most = post("embed", "/v1/embeddings", input="w7 " * 99, truncate_prompt_tokens=-1)
    assert [body["usage"]["prompt_tokens"] for body in (plain, cut, most)] == [1, 5, 64]


def test_a_conversation_is_rendered(post, models):
    messages = [{"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8"}]
    body = post("embed", "/v1/embeddings", messages=messages, chat_template=TEMPLATE)
    np.testing.assert_allclose(body["data"][0]["embedding"], embedding(models, [7, 8]), atol=1e-6)


def test_fewer_dimensions(post):
    (data,) = post("embed", "/v1/embeddings", input="w7", dimensions=16)["data"]
    assert len(data["embedding"]) == 16
    error = post("embed", "/v1/embeddings", 400, input="w7", dimensions=8)["error"]
    assert error["param"] == "dimensions" and "one of 16, got 8" in error["message"]


def test_rewards_are_per_token(post):
    (data,) = post("reward", "/pooling", input=[[5, 6, 7]])["data"]
    assert np.array(data["data"]).shape == (3, 1) and data["object"] == "pooling"


def test_classes_have_names(post, models):
    body = post("classify", "/classify", input=["w7", "w8 w9"])
    outputs = models["classify"].classify(["w7", "w8 w9"], use_tqdm=False)
    for data, output in zip(body["data"], outputs, strict=True):
        probs = output.outputs.probs
        assert data["probs"] == pytest.approx(probs, abs=1e-6)
        assert data["label"] == ("good", "bad", "ugly")[int(np.argmax(probs))]
        assert data["num_classes"] == 3
    assert body["usage"]["completion_tokens"] == 0 and body["usage"]["prompt_tokens"] == 7


@pytest.mark.parametrize("kind", ["embed", "score"])
@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_are_those_of_the_offline_engine(kind, path, post, models):
    for first, second in (("w7", ["w8", "w7"]), (["w7", "w9"], ["w8 w5", "w7"])):
        body = post(kind, path, text_1=first, text_2=second)
        want = [o.outputs.score for o in models[kind].score(first, second, use_tqdm=False)]
        assert [data["score"] for data in body["data"]] == pytest.approx(want, abs=1e-6)
        assert [data["index"] for data in body["data"]] == [0, 1]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_best_first(path, post, models):
    documents = ["w8", "w7 w9", "w30 w31 w32", "w7"]
    body = post("score", path, query="w7", documents=documents)
    scores = [o.outputs.score for o in models["score"].score("w7", documents, use_tqdm=False)]
    order = sorted(range(4), key=lambda index: -scores[index])
    assert [result["index"] for result in body["results"]] == order
    assert [result["document"]["text"] for result in body["results"]] == [
        documents[index] for index in order
    ]
    values = [result["relevance_score"] for result in body["results"]]
    assert values == pytest.approx([scores[index] for index in order], abs=1e-6)
    assert body["usage"] == {"total_tokens": sum(4 + len(d.split()) for d in documents)}
    top = post("score", path, query="w7", documents=documents, top_n=2)
    assert top["results"] == body["results"][:2]


def test_documents_may_be_objects_and_be_left_out_of_the_answer(post):
    path = "/v1/rerank"
    plain = post("score", path, query="w7", documents=["w8", "w7"])["results"]
    documents = ["w8", {"text": "w7", "id": 5}]
    assert post("score", path, query="w7", documents=documents, top_n=None)["results"] == plain
    shown = post("score", path, query="w7", documents=documents, return_documents=False)
    for result in plain:
        del result["document"]
    assert shown["results"] == plain


VECTOR = {"input": ["w7", "w8 w9"], "dimensions": 16}
RANKED = {"query": "w7", "documents": ["w8", "w7", "w9"], "top_n": 1}


@loop_over(
    "kind, path, plain, spelling",
    [
        ("embed", "/v1/embeddings", VECTOR, {**VECTOR, "input": [{"text": "w7"}, "w8 w9"]}),
        ("embed", "/v1/embeddings", VECTOR, {"input": VECTOR["input"], "output_dimension": 16}),
        *[
            ("embed", "/v1/embeddings", VECTOR, {**VECTOR, **other})
            for other in (
                {"embedding_type": "float", "late_chunking": False, "normalized": True},
                {"embedding_types": ["float"], "input_type": "search_query", "truncate": "NONE"},
                {"output_dtype": "float", "truncation": True, "output_dimension": None},
            )
        ],
        (
            "embed",
            "/v1/embeddings",
            {"input": "w7", "encoding_format": "base64"},
            {"input": {"text": "w7"}, "embedding_type": ["base64"], "encoding_format": None},
        ),
        (
            "embed",
            "/v1/embeddings",
            {"input": "w7 " * 99, "truncate_prompt_tokens": -1},
            {"input": "w7 " * 99, "truncate": True},
        ),
        ("embed", "/v1/embeddings", {"input": "w7"}, {"input": "w7", "dimensions": 64}),
        (
            "score",
            "/rerank",
            RANKED,
            {"query": {"text": "w7"}, "documents": ["w8", {"text": "w7"}, "w9"], "top_k": 1},
        ),
        *[
            ("score", "/score", {"text_1": "w7", "text_2": ["w8"]}, other)
            for other in (
                {"queries": "w7", "documents": ["w8"]},
                {"data_1": {"text": "w7"}, "data_2": [{"text": "w8"}]},
            )
        ],
    ],
)
def test_spellings_of_other_apis_have_the_same_answer(kind, path, plain, spelling, post):
    answers = [post(kind, path, **body) for body in (plain, spelling)]
    for answer in answers:
        del answer["id"]
        answer.pop("created", None)
    assert answers[0] == answers[1]


@loop_over(
    "kind, path, body, words",
    [
        ("generate", "/v1/embeddings", {"input": "w7"}, "start it with task='embed'"),
        ("generate", "/classify", {"input": "w7"}, "start it with task='classify'"),
        ("generate", "/score", {"text_1": "w7", "text_2": "w8"}, "/v1/chat/completions"),
        ("classify", "/v1/embeddings", {"input": "w7"}, "POST /classify"),
        ("classify", "/rerank", {"query": "w7", "documents": ["w8"]}, "with one label"),
        ("embed", "/classify", {"input": "w7"}, "POST /v1/embeddings"),
        ("embed", "/v1/embeddings", {"input": "w7 " * 99}, "has 101 tokens"),
        (
            "embed",
            "/v1/embeddings",
            {"input": ["w7", ""], "add_special_tokens": False},
            "prompt 1 of 2: the prompt is empty",
        ),
        *[
            (kind, path, {"input": []}, "input is empty: send at least one entry")
            for kind, path in (
                ("embed", "/v1/embeddings"),
                ("embed", "/pooling"),
                ("classify", "/classify"),
                ("score", "/classify"),
            )
        ],
        ("classify", "/classify", {"input": [[]]}, "the prompt has no tokens"),
        (
            "score",
            "/score",
            {"text_1": "w7", "text_2": []},
            "text_2 must have at least one string, got none",
        ),
        ("score", "/score", {"text_1": [], "text_2": "w7"}, "text_1 must have at least one string"),
        *[
            (
                "embed",
                "/v1/embeddings",
                {"input": [prompt] * 9},
                "at most 8 (--max-batch-prompts)",
            )
            for prompt in ("w7", [5])
        ],
        ("embed", "/v1/embeddings", {"input": [5000]}, "vocabulary of 4096"),
        ("embed", "/v1/embeddings", {"input": {"a": 1}}, "input"),
        ("embed", "/v1/embeddings", {"input": ["w7", 3]}, "input"),
        ("embed", "/v1/embeddings", {}, "input is required"),
        ("embed", "/v1/embeddings", {"inputs": "w7"}, "has inputs instead: rename it to input"),
        (
            "embed",
            "/v1/embeddings",
            {"input": "w7", "messages": [{"role": "user", "content": "w7"}]},
            "give either input or messages",
        ),
        ("embed", "/v1/embeddings", {"input": [{"image": "x"}]}, "entry 0 is an object"),
        ("embed", "/v1/embeddings", {"input": "w7", "embedding_type": "binary"}, "embedding_type"),
        ("embed", "/v1/embeddings", {"input": "w7", "output_dtype": "int8"}, "float or base64"),
        ("embed", "/v1/embeddings", {"input": "w7", "output_dimension": 8}, "one of 16, got 8"),
        ("embed", "/v1/embeddings", {"input": "w7", "late_chunking": True}, "late_chunking"),
        ("embed", "/v1/embeddings", {"input": "w7", "truncate": "START"}, 'got "START"'),
        ("embed", "/v1/embeddings", {"input": "w7", "normalized": False}, "pooler-config"),
        ("score", "/rerank", {"query": "w7", "texts": ["w8"]}, "rename it to documents"),
        ("score", "/rerank", {"query": {"image": "x"}, "documents": ["w8"]}, "query must be text"),
        ("score", "/score", {"text1": "w7", "text_2": "w8"}, "has text1 instead"),
        ("embed", "/v1/embeddings", {"input": "w7", "dimensions": -1}, "dimensions must be"),
        ("embed", "/v1/embeddings", {"input": "w7", "dimensions": 2**80}, "dimensions"),
        ("embed", "/v1/embeddings", {"input": "w7", "truncate_prompt_tokens": 0}, "-1 or at least"),
        ("embed", "/v1/embeddings", {"input": "w7", "truncate_prompt_tokens": -2}, "truncate"),
        ("embed", "/v1/embeddings", {"input": "w7", "encoding_format": "hex"}, "encoding_format"),
        ("embed", "/v1/embeddings", {"input": "w7", "priority": 2**64}, "priority"),
        (
            "embed",
            "/score",
            {"text_1": ["w7", "w8"], "text_2": "w9"},
            "as many as text_2 (1), got 2",
        ),
        (
            "score",
            "/score",
            {"text_1": "w7", "text_2": ["w9"] * 9},
            "text_2: 9 texts are more",
        ),
        ("score", "/rerank", {"query": "w7", "documents": []}, "documents"),
        ("score", "/rerank", {"query": "w7", "documents": ["w8"], "top_n": -1}, "top_n"),
        (
            "score",
            "/rerank",
            {"query": "w7", "documents": ["w8", {"title": "w7"}]},
            "documents.1 must be a string or an object with text, got an object",
        ),
        (
            "score",
            "/rerank",
            {"query": "w7", "documents": [{"text": 7}]},
            "documents.0 must be a string or an object with text, got 7",
        ),
        ("score", "/rerank", {"query": "w7", "documents": ["w8 " * 99]}, "103 tokens"),
    ],
)
def test_what_is_wrong_is_a_400_that_says_so(kind, path, body, words, post):
    error = post(kind, path, 400, **body)["error"]
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


def test_an_unknown_model_is_not_found(post):
    error = post("embed", "/v1/embeddings", 404, input="w7", model="other")["error"]
    assert (error["type"], error["code"]) == ("not_found_error", "model_not_found")


def test_ids_and_priority_reach_the_engine(models):
    client, engine = make_pooling_client(models["embed"])
    headers = {"x-request-id": "mine"}
    body = {"input": ["w7", "w8"], "priority": 3}
    assert client.post("/v1/embeddings", json=body, headers=headers).json()["id"] == "embd-mine"
    ids = [request_id for *_, request_id in engine.seen]
    assert [re.fullmatch(r"embd-mine-[0-9a-f]{8}-(\d)", i)[1] for i in ids] == ["0", "1"]
    assert [request.priority for request in engine.client.received] == [3, 3]


def test_one_wrong_prompt_leaves_nothing_in_the_engine(post, models):
    post("embed", "/v1/embeddings", 400, input=["w7", "w8", "w7 " * 99])
    assert not models["embed"].llm_engine.has_unfinished_requests()
    post("embed", "/v1/embeddings", input="w7")
