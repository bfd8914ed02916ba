"""Test POST /v1/completions over a scripted core."""

import base64
import json
import re

import numpy
import pytest
import safetensors.numpy

from tests.engine.tokenizers_for_tests import byte_level
from tests.entrypoints.openai.fakes import MODEL, client_of
from tests.entrypoints.openai.sse_reader import chunks_of, text_of
from tests.fake_core import FakeCoreLLM
from tests.loops import loop_over
from vllm.entrypoints.openai.completion import serving
from vllm.entrypoints.openai.completion.serving import router
from vllm.messages import EngineRequest

TOKENIZER = byte_level()
TEXT = "def foo(x): return xé"
SCRIPT = TOKENIZER(TEXT, add_special_tokens=False)["input_ids"]
PATH = "/v1/completions"


def reply(request: EngineRequest) -> list[int]:
    return [*SCRIPT, TOKENIZER.eos_token_id]


@pytest.fixture
def engine():
    return FakeCoreLLM(reply)


@pytest.fixture
def client(engine):
    with client_of(engine, router, max_n=4, max_stop_strings=2, max_batch_prompts=3) as client:
        yield client


def as_sent(value):
    """Return the value of a constraint as the core gets it: a schema as JSON text."""
    return json.dumps(value) if isinstance(value, dict) else value


def complete(client, **body):
    response = client.post(PATH, json={"prompt": "a b", **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_no_log_probabilities_may_also_be_false(client):
    logprobs = [complete(client, logprobs=given)["choices"][0]["logprobs"] for given in (False, 0)]
    assert logprobs[0] is None and logprobs[1]["tokens"]


def test_a_text_is_continued(client, engine):
    body = complete(client, max_tokens=100)
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", MODEL)
    assert body["choices"] == [
        {
            "index": 0,
            "text": TEXT,
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "prompt_logprobs": None,
        }
    ]
    num_output = len(SCRIPT) + 1  # the end token counts as an output token
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": num_output,
        "total_tokens": 3 + num_output,
        "prompt_tokens_details": None,
    }
    assert not engine.core.running


@pytest.mark.parametrize(
    ("prompt", "num_prompt_tokens", "num_choices"),
    [("a b", 3, 1), ([5, 6], 2, 1), (["a", "a b"], 5, 2), ([[5], [6, 7]], 3, 2)],
)
def test_prompts_of_every_form(client, prompt, num_prompt_tokens, num_choices):
    body = complete(client, prompt=prompt, n=2, max_tokens=2)
    assert [c["index"] for c in body["choices"]] == list(range(2 * num_choices))
    assert body["usage"]["prompt_tokens"] == num_prompt_tokens
    assert body["usage"]["completion_tokens"] == 4 * num_choices


def test_a_batch_that_is_long_as_a_whole_is_tokenised_like_a_short_one(client, engine):
    short = complete(client, prompt="a b", truncate_prompt_tokens=5, max_tokens=1)
    long = ["a b", "word " * 5000, "a b"]
    body = complete(client, prompt=long, truncate_prompt_tokens=5, max_tokens=1)
    assert body["usage"]["prompt_tokens"] == 5 + 2 * short["usage"]["prompt_tokens"]
    prompts = [prompt["prompt_token_ids"] for prompt, *_ in engine.seen]
    assert prompts[0] == prompts[1] == prompts[3]


def test_a_stream_tells_what_the_whole_answer_tells(client):
    for options in ({}, {"echo": True}, {"stop": ["return"]}, {"echo": True, "logprobs": 1}):
        wanted = dict(options, prompt=["a b", "c"], n=2, max_tokens=30)
        whole = complete(client, **wanted)
        wanted |= {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, usage = chunks_of(client.post(PATH, json=wanted).text)
        assert usage["choices"] == []
        assert usage["usage"] == whole["usage"]
        assert all("usage" not in chunk for chunk in chunks)
        for choice in whole["choices"]:
            mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
            assert "".join(c["text"] for c in mine) == choice["text"]
            assert [c["finish_reason"] for c in mine[:-1]] == [None] * (len(mine) - 1)
            for name in ("finish_reason", "stop_reason"):
                assert mine[-1][name] == choice[name]
            if choice["logprobs"] is not None:
                for name, values in choice["logprobs"].items():
                    assert [v for c in mine for v in c["logprobs"][name]] == values


def test_there_is_one_chunk_per_token(client):
    body = {"prompt": "a", "n": 3, "max_tokens": 5, "stream": True}
    chunks = chunks_of(client.post(PATH, json=body).text)
    indices = [chunk["choices"][0]["index"] for chunk in chunks]
    assert [indices.count(i) for i in range(3)] == [5, 5, 5]


def test_usage_can_come_with_every_chunk(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "a b", "max_tokens": 3, "stream": True, "stream_options": options}
    chunks = chunks_of(client.post(PATH, json=body).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


def test_the_server_can_tell_usage_unasked_and_cached_tokens(engine):
    flags = {"enable_force_include_usage": True, "enable_prompt_tokens_details": True}
    with client_of(engine, router, **flags) as client:
        body = {"prompt": "a b", "max_tokens": 3, "stream": True}
        usage = chunks_of(client.post(PATH, json=body).text)[-1]["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


def test_logprobs_lie_beside_the_tokens_and_point_into_the_text(client):
    choice = complete(client, echo=True, logprobs=2, max_tokens=4)["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:3] == ["<s>", "a", " b"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(len(top) == 2 for top in logprobs["top_logprobs"][1:])
    for token, offset in list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[1:]:
        assert choice["text"][offset:].startswith(token)
    ids = complete(client, logprobs=0, max_tokens=2, return_tokens_as_token_ids=True)
    assert ids["choices"][0]["logprobs"]["tokens"] == [f"token_id:{i}" for i in SCRIPT[:2]]
    assert [len(t) for t in ids["choices"][0]["logprobs"]["top_logprobs"]] == [1, 1]


def test_an_echo_alone_costs_no_output(client):
    body = complete(client, echo=True, logprobs=1, max_tokens=0)
    choice = body["choices"][0]
    assert choice["text"] == "a b"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]
    assert body["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_are_given_by_token_id(client):
    choice = complete(client, prompt=[5, 6, 7], prompt_logprobs=0, max_tokens=1)["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert [list(position) for position in others] == [["6"], ["7"]]
    assert others[0]["6"] == {"logprob": -0.5, "rank": 1, "decoded_token": TOKENIZER.decode([6])}


def test_the_best_of_several_are_returned(client, engine):
    body = complete(client, n=2, best_of=3, max_tokens=2)
    assert [c["index"] for c in body["choices"]] == [0, 1]
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 6
    assert len(engine.core.added) == 3


def test_beams_are_searched(client):
    body = complete(client, use_beam_search=True, n=2, max_tokens=2)
    assert len(body["choices"]) == 2
    assert {c["finish_reason"] for c in body["choices"]} <= {"stop", "length"}


def test_defaults_of_the_model_hold_unless_the_request_says_else():
    engine = FakeCoreLLM(reply, generation_defaults={"temperature": 0.5, "max_tokens": 7})
    with client_of(engine, router) as client:
        complete(client)
        complete(client, temperature=0.25, top_k=3, max_tokens=2)
    params = [params for _, params, _ in engine.seen]
    assert [p.temperature for p in params] == [0.5, 0.25]
    assert [p.max_tokens for p in params] == [7, 2]
    assert [p.top_k for p in params] == [0, 3]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_json", {"type": "object"}),
        ("guided_regex", "a+"),
        ("guided_choice", ["a", "b"]),
        ("guided_grammar", "root ::= 'a'"),
        ("structural_tag", "{}"),
    ],
)
def test_constraints_reach_the_engine(client, engine, field, value):
    complete(client, **{field: value}, guided_decoding_backend="xgrammar")
    guided = engine.seen[-1][1].guided_decoding
    assert getattr(guided, field.removeprefix("guided_")) == as_sent(value)
    assert guided.backend == "xgrammar"


@pytest.mark.parametrize(
    "given",
    [
        {"json": {"type": "object"}, "whitespace_pattern": " ?"},
        {"regex": "a+", "disable_fallback": True},
        {"choice": ["a", "b"]},
        {"grammar": "root ::= 'a'"},
        {"json_object": True, "disable_any_whitespace": True},
        {"structural_tag": "{}"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_structured_outputs_reach_the_engine(client, engine, given):
    complete(client, structured_outputs=given)
    guided = engine.seen[-1][1].guided_decoding
    assert {name: getattr(guided, name) for name in given} == {
        name: as_sent(value) for name, value in given.items()
    }
    assert guided.field == f"structured_outputs.{next(iter(given))}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
    ],
)
def test_structured_outputs_are_checked(client, fields, param):
    response = client.post(PATH, json={"prompt": "a", **fields})
    assert response.status_code == 400, response.text
    assert param in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("wanted", "kind", "value"),
    [
        ({"type": "json_object"}, "json_object", True),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"a": 1}}},
            "json",
            {"a": 1},
        ),
    ],
)
def test_a_response_format_is_a_constraint(client, engine, wanted, kind, value):
    complete(client, response_format=wanted)
    assert getattr(engine.seen[-1][1].guided_decoding, kind) == as_sent(value)
    complete(client, response_format={"type": "text"})
    assert engine.seen[-1][1].guided_decoding is None


def test_the_id_of_the_client_is_taken_when_it_is_harmless(client, engine):
    for given, is_taken in (("my-id.7", True), ("a b", False), ("x" * 200, False)):
        headers = {"X-Request-Id": given}
        response = client.post(PATH, json={"prompt": ["a", "b"], "max_tokens": 1}, headers=headers)
        assert (response.json()["id"] == f"cmpl-{given}") is is_taken
    ids = [request_id for *_, request_id in engine.seen[:2]]
    assert [re.fullmatch(r"cmpl-my-id\.7-([0-9a-f]{8})-([01])", i)[2] for i in ids] == ["0", "1"]


def test_embeddings_come_before_texts():
    engine = FakeCoreLLM(reply, enable_prompt_embeds=True)
    with client_of(engine, router) as client:
        check_embeddings(client, engine)


def check_embeddings(client, engine):
    arch = engine.vllm_config.model.resolved_arch
    tensor = numpy.ones((3, arch.embedding_size), numpy.float32)
    encoded = base64.b64encode(safetensors.numpy.save({"x": tensor})).decode()
    for more, num_tokens, num_choices in (
        ({"prompt": ""}, 3, 2),
        ({"prompt": None, "prompt_embeds": [encoded, encoded]}, 6, 4),
        ({"prompt": "a b"}, 6, 4),
    ):
        engine.client.received.clear()
        body = complete(client, **{"prompt_embeds": encoded, "n": 2, "max_tokens": 2, **more})
        assert [c["index"] for c in body["choices"]] == list(range(num_choices))
        assert all(c["text"] for c in body["choices"])
        assert body["usage"]["prompt_tokens"] == num_tokens
        by_id = sorted(engine.seen, key=lambda each: each[2])
        kinds = ["prompt_embeds" in prompt for prompt, _, _ in by_id]
        assert kinds[0] and len(kinds) == num_choices / 2
        assert all(kinds) == (not more["prompt"])
    fields = {"prompt": None, "prompt_embeds": encoded, "prompt_logprobs": 1}
    response = client.post(PATH, json=fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")
    events = client.post(PATH, json={"prompt_embeds": encoded, "stream": True}).text
    assert text_of(chunks_of(events))


WRONG = [
    ({"prompt": None}, "prompt", 400),
    ({"prompt": None, "messages": [{"role": "user", "content": "a"}]}, "prompt", 400),
    ({"prompt": "", "add_special_tokens": False}, "prompt", 400),
    ({"prompt": []}, "prompt", 400),
    ({"prompt": [[]]}, "prompt", 400),
    ({"prompt": [10**9]}, "prompt", 400),
    ({"prompt": [10**30]}, "prompt", 400),
    ({"prompt": [1, "a"]}, "prompt", 400),
    ({"prompt": {"a": 1}}, "prompt", 400),
    ({"prompt": ["a"] * 4}, "prompt", 400),
    ({"prompt": [1] * 300}, "max_tokens", 400),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds", 400),
    ({"prompt_embeds": 5}, "prompt_embeds", 400),
    ({"prompt_embeds": [], "prompt": None}, "prompt", 400),
    ({"prompt_embeds": "AAAA", "echo": True}, "echo", 400),
    ({"prompt_embeds": "AAAA", "use_beam_search": True}, "use_beam_search", 400),
    ({"prompt_embeds": "AAAA", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", 400),
    ({"prompt_embeds": ["AAAA"] * 3}, "prompt", 400),
    ({"suffix": "x"}, "suffix", 400),
    ({"model": "unknown"}, "model", 404),
    ({"model": 5}, "model", 400),
    ({"max_tokens": 1000}, "max_tokens", 400),
    ({"max_tokens": 0}, "max_tokens", 400),
    ({"max_tokens": -1}, "max_tokens", 400),
    ({"max_tokens": 1.5}, "max_tokens", 400),
    ({"n": 0}, "n", 400),
    ({"n": 5}, "n", 400),
    ({"n": 2, "temperature": 0}, "n", 400),
    ({"best_of": 5}, "best_of", 400),
    ({"n": 2, "best_of": 1}, "best_of", 400),
    ({"best_of": 2, "temperature": 0}, "best_of", 400),
    ({"best_of": 2, "stream": True}, "best_of", 400),
    ({"stop": ["a", "b", "c"]}, "stop", 400),
    ({"stop": [""]}, "stop", 400),
    ({"stop": 5}, "stop", 400),
    ({"logprobs": -1}, "logprobs", 400),
    ({"logprobs": 10**6}, "logprobs", 400),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", 400),
    ({"stream_options": {}}, "stream_options", 400),
    ({"seed": 2**63}, "seed", 400),
    ({"seed": "x"}, "seed", 400),
    ({"temperature": -1}, "temperature", 400),
    ({"temperature": "hot"}, "temperature", 400),
    ({"top_p": 2}, "top_p", 400),
    ({"top_k": -2}, "top_k", 400),
    ({"top_k": 10**30}, "top_k", 400),
    ({"min_p": 2}, "min_p", 400),
    ({"repetition_penalty": 0}, "repetition_penalty", 400),
    ({"presence_penalty": 3}, "presence_penalty", 400),
    ({"logit_bias": {"x": 1}}, "logit_bias", 400),
    ({"logit_bias": {"99999999": 1}}, "logit_bias", 400),
    ({"logit_bias": {"1": None}}, "logit_bias", 400),
    ({"allowed_token_ids": [10**8]}, "allowed_token_ids", 400),
    ({"stop_token_ids": [-1]}, "stop_token_ids", 400),
    ({"min_tokens": 50, "max_tokens": 5}, "min_tokens", 400),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", 400),
    ({"guided_json": 5}, "guided_json", 400),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_json", 400),
    ({"response_format": {"type": "xml"}}, "response_format", 400),
    ({"response_format": {"type": "json_schema"}}, "response_format", 400),
    ({"logits_processors": ["a"]}, "logits_processors", 400),
    ({"cache_salt": ""}, "cache_salt", 400),
    ({"request_id": "a b"}, "request_id", 400),
    ({"priority": 10**20}, "priority", 400),
    ({"use_beam_search": True, "stream": True}, "stream", 400),
]


@loop_over("fields, param, status", WRONG)
def test_what_is_wrong_is_refused_by_name(client, engine, fields, param, status):
    response = client.post(PATH, json={"prompt": "a b", **fields})
    error = response.json()["error"]
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    assert (response.status_code, error["type"]) == (status, kind), error
    assert param in (error["param"] or ""), error
    assert not engine.core.running
    assert complete(client)["choices"][0]["text"]


def test_a_request_that_does_not_fit_is_told_the_numbers(client):
    body = client.post(PATH, json={"prompt": "a b", "max_tokens": 1000}).json()
    assert (
        "This model's maximum context length is 256 tokens. However, you requested 1003 tokens"
        in body["error"]["message"]
    )
    assert body["error"]["code"] == "context_length_exceeded"
    seed = client.post(PATH, json={"prompt": "a", "seed": -(2**70)}).json()["error"]
    assert seed["message"].startswith("seed must be at least -9223372036854775808, got -11805")


def test_a_failure_midway_is_an_event_and_before_the_first_token_a_status(client, engine):
    engine.core.fail_at = 2
    text = client.post(PATH, json={"prompt": "a", "stream": True}).text
    *chunks, error = chunks_of(text)
    assert text_of(chunks) == "def f"
    assert (error["error"]["type"], error["error"]["code"]) == ("server_error", "engine_dead")
    assert "secret" not in text
    assert client.post(PATH, json={"prompt": "a", "stream": True}).status_code == 500


def test_a_request_that_fails_in_the_engine_is_an_error_also_without_a_stream(
    client, engine, monkeypatch
):
    monkeypatch.setattr(serving, "engine_key", lambda response_id: response_id)
    engine.core.errors["cmpl-x-0"] = "bad logits"
    response = client.post(PATH, json={"prompt": "a", "request_id": "x"})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "bad logits"
