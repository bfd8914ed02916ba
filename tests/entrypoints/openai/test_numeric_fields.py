"""Test any number in any field of any route: it is accepted or refused, and the server continues.

Routes and fields are read from the application, so new ones are tested automatically. The engines
are real, and requests are encoded as they are for another process.
"""

import itertools
import json
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import pytest
from fastapi.routing import APIRoute
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, JsonValue
from starlette.testclient import TestClient

from tests.entrypoints.openai.pooling_engine import InlineEngine, pooling_client
from tests.tiny_pooling_models import add_tokenizer, make_pooling_model
from vllm import LLM
from vllm.entrypoints.server.app import MODEL_ROUTES

pytestmark = pytest.mark.filterwarnings("ignore:temperature .* is raised")

USER = [{"role": "user", "content": "Hi"}]
MAX_MODEL_LEN = 64
PROMPT = {"prompt": "def", "max_tokens": 2}
CHAT = {"messages": USER, "max_tokens": 2}
SAMPLED = {"n": 2, "temperature": 0.8, "seed": 1, "top_p": 0.9}
BEAMS = {"use_beam_search": True, "n": 2}
STREAM = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
PAIR = {"text_1": "w7", "text_2": ["w8", "w9 w7"]}
QUERY = {"query": "w7", "documents": ["w8", "w9 w7"]}
BODIES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "/v1/completions": [
        ("generate", PROMPT),
        ("generate", {**PROMPT, **SAMPLED, **STREAM}),
        ("generate", {**PROMPT, **BEAMS}),
        ("generate", {**PROMPT, "echo": True, "logprobs": 1}),
    ],
    "/v1/chat/completions": [
        ("generate", CHAT),
        ("generate", {**CHAT, **SAMPLED, **STREAM}),
        ("generate", {**CHAT, **BEAMS}),
        ("generate", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    ],
    "/v1/responses": [
        ("generate", {"input": "Hi", "max_output_tokens": 2}),
        ("generate", {"input": "Hi", "max_output_tokens": 2, "stream": True, "top_logprobs": 1}),
    ],
    "/v1/responses/input_tokens": [("generate", {"input": "Hi"})],
    "/v1/messages": [
        ("generate", {"messages": USER, "max_tokens": 2}),
        ("generate", {"messages": USER, "max_tokens": 2, "stream": True}),
    ],
    "/v1/messages/count_tokens": [("generate", {"messages": USER})],
    "/tokenize": [("generate", {"prompt": "def"}), ("generate", {"messages": USER})],
    "/detokenize": [("generate", {"tokens": [5, 6]})],
    "/v1/embeddings": [("embed", {"input": "w7 w8"}), ("embed", {"input": ["w7", "w8 w9"]})],
    "/pooling": [("embed", {"input": "w7 w8"}), ("reward", {"input": "w7 w8"})],
    "/classify": [("classify", {"input": "w7 w8"})],
    "/score": [("score", PAIR), ("embed", PAIR)],
    "/v1/score": [("score", PAIR)],
    "/rerank": [("score", QUERY), ("embed", QUERY)],
    "/v1/rerank": [("score", QUERY)],
    "/v2/rerank": [("score", QUERY)],
}
"""Route -> kinds of models, and bodies that they answer with 200."""
EXTREMES: list[int | float] = [
    *(0, -0.0, 1, -1, 2, 0.1, -0.1, 20, 21, 128, MAX_MODEL_LEN - 1, MAX_MODEL_LEN, 10**4, -(10**4)),
    *(1e4, -1e4, 5e-324, -5e-324, 1e-45, 1e-6, 1e38, 1e39, 1e308, -1e308),
    *(2**31 - 1, 2**31, -(2**31), 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 10**400, 0.1 + 0.2),
]
WORST = (-1, 5e-324, 1e308, -1e4, 2**63 - 1, 2**64)
"""Enough to find whatever has failed so far. More examples come from hypothesis."""
NUMBERS = (
    st.sampled_from(EXTREMES)
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
)
COMPILED = ("guided_json",)
"""Starts a process that compiles grammars: tests/engine/test_input_processor.py has its numbers."""
ALIASES = ("/v1/score", "/v1/rerank", "/v2/rerank")
Wrap = Callable[[Any], Any]
"""Puts a number where a field has one, such as into a list."""


# ---- which fields have numbers ------------------------------------------------------------------


def places_of(annotation: Any) -> Iterator[Wrap]:
    """Yield where a value of this type may contain a number."""
    if annotation is JsonValue:
        yield from (lambda number: number, lambda number: {"1": [number]})
        return
    while hasattr(annotation, "__metadata__"):
        annotation = annotation.__origin__
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (int, float):
        yield lambda number: number
    elif origin in (typing.Union, types.UnionType):
        for each in args:
            yield from places_of(each)
    elif origin is list:
        for wrap in places_of(args[0]):
            yield lambda number, wrap=wrap: [wrap(number)]
    elif origin is dict and args:
        yield lambda number: {"1": number}
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, wrap in fields_of(annotation):
            yield lambda number, name=name, wrap=wrap, model=annotation: {
                **least_of(model),
                name: wrap(number),
            }


def fields_of(model: type[BaseModel]) -> list[tuple[str, Wrap]]:
    """Return the fields of a model that may contain a number."""
    hints = typing.get_type_hints(model, include_extras=True)
    return [
        (field.alias or name, wrap)
        for name, field in model.model_fields.items()
        if name not in COMPILED
        for wrap in places_of(hints[name])
    ]


def least_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return values for the required fields of a model."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if field.is_required():
            choices = typing.get_args(field.annotation)
            is_choice = typing.get_origin(field.annotation) is Literal
            found[name] = choices[0] if is_choice else "a"
    return found


def body_models(route: APIRoute) -> list[type[BaseModel]]:
    """Return the models that a route accepts: one model, or several."""
    if route.body_field is None:
        return []
    annotation: Any = route.body_field.field_info.annotation
    options = typing.get_args(annotation) or (annotation,)
    found = [each.__origin__ if hasattr(each, "__metadata__") else each for each in options]
    return [each for each in found if isinstance(each, type) and issubclass(each, BaseModel)]


ROUTES = {
    route.path: [field for model in models for field in fields_of(model)]
    for module in MODEL_ROUTES
    for route in module.router.routes
    if isinstance(route, APIRoute) and (models := body_models(route))
}
"""Path -> its fields with numbers."""


# ---- the server ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, TestClient]]:
    """Run a server for each kind of model."""
    limits: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "num_gpu_blocks_override": 256}

    def tiny(architecture: str, **config: Any) -> str:
        folder: Path = tmp_path_factory.mktemp(architecture)
        return str(add_tokenizer(make_pooling_model(architecture, folder, **config)))

    llms = {
        "generate": LLM(max_num_seqs=16, **limits),
        "embed": LLM(tiny("BertModel", matryoshka_dimensions=[16]), dtype="float32", **limits),
        "classify": LLM(tiny("BertForSequenceClassification"), **limits),
        "score": LLM(tiny("BertForSequenceClassification", num_labels=1), **limits),
        "reward": LLM(tiny("Qwen2ForRewardModel"), **limits),
    }
    with ExitStack() as stack:
        yield {
            kind: stack.enter_context(pooling_client(InlineEngine(llm), max_batch_prompts=8))
            for kind, llm in llms.items()
        }


def check(clients: dict[str, TestClient], path: str, kind: str, body: dict[str, Any]) -> int:
    """Send a request; return the status of the answer, which must not be a failure of the
    server.
    """
    answer = clients[kind].post(
        path, content=json.dumps(body), headers={"content-type": "application/json"}
    )
    told = f"{body} -> {answer.status_code} {answer.text[:400]}"
    assert answer.status_code in (200, 400), told
    if answer.status_code == 400:
        found = answer.json()
        assert found["error"]["message"], told
    elif "event-stream" in answer.headers["content-type"]:
        assert '"error":{' not in answer.text, told
    else:
        json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} in {told}"))
    return answer.status_code


def test_every_route_with_a_body_is_tried():
    assert ROUTES.keys() == BODIES.keys()
    assert {name for name, _ in ROUTES["/v1/completions"]} > {
        *("n", "best_of", "temperature", "top_k", "seed", "length_penalty", "logit_bias"),
        *("stop_token_ids", "prompt", "truncate_prompt_tokens", "logprobs", "max_tokens"),
    }
    assert {name for name, _ in ROUTES["/v1/messages"]} > {"thinking", "max_tokens", "top_p"}


@pytest.mark.parametrize("path", BODIES)
def test_bodies_without_extremes_are_answered(clients, path):
    assert [check(clients, path, kind, body) for kind, body in BODIES[path]] == [200] * len(
        BODIES[path]
    )


@pytest.mark.parametrize("path", [path for path in BODIES if path not in ALIASES])
def test_an_extreme_number_in_any_field_is_taken_or_refused(clients, path):
    bodies = itertools.cycle(BODIES[path])
    for name, wrap in ROUTES[path]:
        for number in WORST:
            kind, body = next(bodies)
            check(clients, path, kind, {**body, name: wrap(number)})


@pytest.mark.parametrize("path", BODIES)
def test_any_numbers_in_some_fields_are_taken_or_refused(clients, path):
    @settings(max_examples=12)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        kind, body = data.draw(st.sampled_from(BODIES[path]))
        fields = data.draw(st.lists(st.sampled_from(ROUTES[path]), min_size=1, max_size=4))
        numbers = {name: wrap(data.draw(NUMBERS)) for name, wrap in fields}
        check(clients, path, kind, {**body, **numbers})

    run()
