"""Test requests at the limit of each field: they are accepted and do not block the server.

A whole server, whose core has no model, runs in one process. During each request, a heartbeat
measures how much processor time this process spends between two turns of the event loop.
"""

import asyncio
import json
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import httpx
import numpy as np
import pytest

from tests.engine.fakes import make_config
from tests.entrypoints.openai.scripted_engine import (
    TEMPLATE,
    ScriptedEngine,
    make_app,
    make_client,
    open_stream,
)
from tests.fake_core import FakeCoreClient, FakeEngineCore, fake_clients, running
from tests.loops import loop_over
from vllm.config import ModelConfig, MultiModalConfig, PoolerConfig
from vllm.engine.async_llm_engine import AsyncLLM
from vllm.engine.input.sampling_input import SamplingInput
from vllm.entrypoints.http.body_route import BodyRoute, body_classes
from vllm.entrypoints.http.request_limits import count_values, limits_of
from vllm.entrypoints.openai.chat import prompt
from vllm.entrypoints.openai.chat import serving as chat_serving
from vllm.entrypoints.openai.completion import serving
from vllm.entrypoints.openai.shared.chunks import json_response
from vllm.entrypoints.openai.shared.merge import merge
from vllm.entrypoints.server.app import build_app, server_routers
from vllm.entrypoints.shared.context import ServerContext
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.messages import EngineOutput, Finished, FinishReason
from vllm.utils.arguments import flag_of

ARGS = ServerArgs(
    chat_template=TEMPLATE,
    disable_uvicorn_access_log=True,
    enable_auto_tool_choice=True,
    tool_call_parser="hermes",
)
VOCAB_SIZE = 4096
MAX_MODEL_LEN = 2**20


class PoolingCore(FakeEngineCore):
    """Returns two values for every prompt."""

    def step(self) -> EngineOutput:
        names = list(self.running)
        self.running.clear()
        return EngineOutput(
            finished=dict.fromkeys(names, Finished(FinishReason.STOP)),
            pooled=dict.fromkeys(names, np.array([0.5, 0.5], np.float32)),
        )


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def flat_tool(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object"}}


@dataclass
class Case:
    """A field that can have any number of entries.

    Attributes:
        setting: field of `ServerArgs` that limits it.
        fill: number of entries -> the fields of the body.
        task: task of the model.
    """

    path: str
    setting: str
    fill: Any
    task: str = "generate"


COMPLETION = {"prompt": [5], "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
RESPONSE = {"input": "a", "max_output_tokens": 1, "store": False}
MESSAGE = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


def users(count: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "a"}] * count


def on_completions(setting: str, fill: Any) -> Case:
    return Case("/v1/completions", setting, lambda count: {**COMPLETION, **fill(count)})


CASES = [
    on_completions("max_n", lambda k: {"n": k}),
    on_completions("max_n", lambda k: {"best_of": k, "n": 1}),
    on_completions("max_batch_prompts", lambda k: {"prompt": ["a"] * k}),
    on_completions("max_batch_prompts", lambda k: {"prompt": [[5]] * k}),
    on_completions(
        "max_batch_sequences", lambda k: {"prompt": [[5]] * (k // 64 + k % 64), "n": 64}
    ),
    on_completions("max_stop_strings", lambda k: {"stop": ["x" * 256] * k}),
    on_completions("max_word_chars", lambda k: {"stop": "x" * k}),
    on_completions("max_word_chars", lambda k: {"bad_words": ["x" * k]}),
    on_completions("max_stop_token_ids", lambda k: {"stop_token_ids": [*range(k)]}),
    on_completions("max_bad_words", lambda k: {"bad_words": [f"word {i}" for i in range(k)]}),
    on_completions(
        "max_logit_bias",
        lambda k: {"logit_bias": {f"{i:05}" if i < VOCAB_SIZE else "x": 1 for i in range(k)}},
    ),
    on_completions(
        "max_allowed_token_ids",
        lambda k: {"allowed_token_ids": [i % VOCAB_SIZE for i in range(k)], "n": 128},
    ),
    on_completions("max_request_values", lambda k: {"user_data": [1] * (k - 5)}),
    on_completions("max_request_names", lambda k: {"user_data": [{"a": 1}] * (k - 3)}),
    on_completions(
        "max_request_values",
        lambda k: {"prompt": [[5]] * 1024, "allowed_token_ids": [1] * (k // 1024 + k % 1024)},
    ),
    Case("/v1/chat/completions", "max_messages", lambda k: {**CHAT, "messages": users(k)}),
    Case(
        "/v1/chat/completions",
        "max_tools",
        lambda k: {**CHAT, "tools": [tool(f"f{i}") for i in range(k)]},
    ),
    Case("/v1/chat/completions", "max_batch_prompts", lambda k: {**CHAT, "documents": [{}] * k}),
    Case("/invocations", "max_messages", lambda k: {**CHAT, "messages": users(k)}),
    Case("/v1/responses", "max_messages", lambda k: {**RESPONSE, "input": users(k)}),
    Case(
        "/v1/responses",
        "max_tools",
        lambda k: {**RESPONSE, "tools": [flat_tool(f"f{i}") for i in range(k)]},
    ),
    Case("/v1/responses", "max_stop_strings", lambda k: {**RESPONSE, "stop": ["x" * 256] * k}),
    Case("/v1/messages", "max_messages", lambda k: {**MESSAGE, "messages": users(k)}),
    Case(
        "/v1/messages",
        "max_tools",
        lambda k: {**MESSAGE, "tools": [{"name": f"f{i}", "input_schema": {}} for i in range(k)]},
    ),
    Case("/v1/messages", "max_stop_strings", lambda k: {**MESSAGE, "stop_sequences": ["x"] * k}),
    Case("/tokenize", "max_messages", lambda k: {"messages": users(k)}),
    Case("/detokenize", "max_detokenize_tokens", lambda k: {"tokens": [300] * k}),
    Case("/v1/embeddings", "max_batch_prompts", lambda k: {"input": ["a b c"] * k}, "embed"),
    Case("/v1/embeddings", "max_batch_prompts", lambda k: {"input": [[5] * 500] * k}, "embed"),
    Case("/v1/embeddings", "max_messages", lambda k: {"messages": users(k)}, "embed"),
    Case("/pooling", "max_batch_prompts", lambda k: {"input": ["a b c"] * k}, "embed"),
    Case("/classify", "max_batch_prompts", lambda k: {"input": ["a b c"] * k}, "classify"),
    Case("/score", "max_batch_prompts", lambda k: {"text_1": "a", "text_2": ["b"] * k}, "embed"),
    Case(
        "/v1/rerank",
        "max_batch_prompts",
        lambda k: {"query": "a", "documents": [f"document {i} " * 20 for i in range(k)]},
        "embed",
    ),
]
FIRST_OF_SETTING = {case.setting: case for case in reversed(CASES)}


LONGEST_WAIT_S = 1.0
"""Of other requests, in processor time of this process: it does not depend on what else the machine
does."""


class Heartbeat:
    """Measures the longest time between two turns of the event loop.

    Attributes:
        longest_s: processor time of all threads of this process in that time.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def __aenter__(self) -> "Heartbeat":
        self._last = time.process_time()
        self._task = asyncio.ensure_future(self._beat())
        return self

    async def __aexit__(self, *_: Any) -> None:
        self._task.cancel()
        self._note()

    async def _beat(self) -> None:
        while True:
            self._note()
            await asyncio.sleep(0.005)

    def _note(self) -> None:
        now = time.process_time()
        self.longest_s, self._last = max(self.longest_s, now - self._last), now


def serve(monkeypatch, task: str, check: Any, **settings: Any) -> None:
    """Run `check(client)` on a server whose model has this task."""
    config, core = make_config(MAX_MODEL_LEN), FakeEngineCore()
    if task != "generate":
        labels = ("no", "yes") if task == "classify" else ()
        pooler = PoolerConfig(task=task, pooling_type="LAST", labels=labels)
        config, core = make_config(MAX_MODEL_LEN, pooler=pooler), PoolingCore()

    async def main() -> None:
        engine = AsyncLLM(config=config)
        try:
            await engine.start()
            app = build_app(ServerContext(ARGS, engine, created=0.0))
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                await check(client, engine)
        finally:
            engine.shutdown()

    with fake_clients(FakeCoreClient(core)):
        asyncio.run(main())


# One case of each setting runs in every run. Exhaustive: other routes and fields with the same
# limit.
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=f"{case.path}-{case.setting}",
            marks=() if case is FIRST_OF_SETTING[case.setting] else pytest.mark.exhaustive,
        )
        for case in CASES
    ],
)
def test_the_largest_accepted_value_leaves_the_event_loop_to_others(case, monkeypatch):
    most = getattr(ARGS, case.setting)

    async def check(client, engine):
        async with Heartbeat() as heart:
            accepted = await client.post(case.path, json=case.fill(most), timeout=120)
        assert accepted.status_code == 200, accepted.text[:500]
        assert heart.longest_s < LONGEST_WAIT_S
        async with Heartbeat() as heart:
            refused = await client.post(case.path, json=case.fill(most + 1), timeout=120)
        assert heart.longest_s < LONGEST_WAIT_S
        assert refused.status_code == 400, refused.text[:500]
        assert flag_of(case.setting) in refused.text and str(most) in refused.text
        assert engine.num_unfinished_requests == 0

    serve(monkeypatch, case.task, check)


MANY_WORDS = [f"bad word {i}" for i in range(4096)]


@pytest.mark.parametrize(
    ("path", "fields", "is_large"),
    [
        ("/v1/completions", {"prompt": "a"}, False),
        ("/v1/completions", {"prompt": "a", "bad_words": MANY_WORDS}, True),
        ("/v1/completions", {"prompt": [5] * 200_000}, True),
        ("/v1/chat/completions", {"messages": users(1)}, False),
        ("/v1/chat/completions", {"messages": users(2000)}, True),
        ("/v1/messages", {"messages": users(2000)}, True),
        ("/v1/responses", {"input": users(2000)}, True),
    ],
)
def test_large_requests_are_prepared_in_other_threads(path, fields, is_large, monkeypatch):
    threads: dict[str, threading.Thread] = {}

    def watch(place: Any, name: str) -> None:
        work = getattr(place, name)

        def watched(*args: Any, **more: Any) -> Any:
            threads[name] = threading.current_thread()
            return work(*args, **more)

        monkeypatch.setattr(place, name, watched)

    async def check(client, engine):
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        answer = await client.post(path, json={**fields, limit: 1}, timeout=120)
        assert answer.status_code == 200, answer.text[:500]

    watch(BodyRoute, "read_body")
    watch(prompt, "render_with_media")
    if path == "/v1/completions":  # a conversation has only token ids left at this point
        watch(SamplingInput, "check")
    serve(monkeypatch, "generate", check)
    assert threads.keys() >= {"read_body"}
    assert ("render_with_media" in threads) == (path != "/v1/completions")
    here = threading.current_thread()
    assert {thread is not here for thread in threads.values()} == {is_large}


@pytest.mark.parametrize("num_tokens", [10, 1000])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_many_log_probabilities_are_written_in_another_thread(path, num_tokens, monkeypatch):
    threads: list[threading.Thread] = []
    place = serving if path == "/v1/completions" else chat_serving

    def watched(body: Any) -> Any:
        threads.append(threading.current_thread())
        return json_response(body)

    monkeypatch.setattr(place, "json_response", watched)

    async def check() -> None:
        engine = ScriptedEngine(*"a" * num_tokens, max_model_len=2048)
        transport = httpx.ASGITransport(make_app(engine))
        client = httpx.AsyncClient(transport=transport, base_url="http://test")
        async with running(engine), client:
            fields = (
                {**COMPLETION, "logprobs": 1}
                if path == "/v1/completions"
                else {**CHAT, "logprobs": True, "top_logprobs": 1}
            )
            answer = await client.post(path, json={**fields, "max_tokens": num_tokens + 1})
        assert answer.status_code == 200, answer.text
        logprobs = answer.json()["choices"][0]["logprobs"]
        assert len(logprobs.get("content") or logprobs["tokens"]) == num_tokens + 1
        assert (threads[0] is not threading.current_thread()) == (num_tokens == 1000)

    asyncio.run(check())


LONG_TEXT = "the cat sat on the mat. " * 600_000  # 14 MB of text
LONG_CHAT = [{"role": "user", "content": LONG_TEXT}]


@pytest.mark.parametrize(
    ("task", "path", "body"),
    [
        ("generate", "/v1/completions", {"prompt": LONG_TEXT}),
        ("generate", "/v1/completions", {"prompt": ["a", LONG_TEXT]}),
        (
            "generate",
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": LONG_TEXT}]},
        ),
        ("generate", "/v1/responses", {"input": LONG_TEXT}),
        (
            "generate",
            "/v1/messages",
            {"max_tokens": 1, "messages": [{"role": "user", "content": LONG_TEXT}]},
        ),
        ("embed", "/v1/embeddings", {"input": LONG_TEXT}),
        ("embed", "/v1/embeddings", {"input": ["a", LONG_TEXT]}),
        ("embed", "/rerank", {"query": "a", "documents": [LONG_TEXT]}),
    ],
)
def test_a_text_of_megabytes_is_refused_before_it_is_tokenised(task, path, body, monkeypatch):
    monkeypatch.setattr("tests.entrypoints.openai.test_request_limits.MAX_MODEL_LEN", 1024)

    async def check(client, engine):
        async with Heartbeat() as heart:
            response = await client.post(path, json=body, timeout=120)
        assert response.status_code == 400
        assert "maximum context length is 1024 tokens" in response.text
        assert heart.longest_s < LONGEST_WAIT_S

    serve(monkeypatch, task, check)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_request_whose_client_leaves_is_not_prepared_to_its_end(path):
    async def main():
        engine, begun, count = ScriptedEngine("a"), asyncio.Event(), 0
        tokenize = engine.tokenize

        async def watched_tokenize(text, **options):
            nonlocal count
            count += 1
            if count == 10 or path == "/tokenize":
                begun.set()
            if path == "/tokenize":
                await asyncio.Event().wait()  # runs until it is cancelled
            return await tokenize(text, **options)

        engine.tokenize = watched_tokenize
        given = ["a"] * 1000 if path == "/v1/completions" else "a"
        body = json.dumps({"prompt": given, "max_tokens": 1}).encode()
        async with running(engine), open_stream(make_app(engine), path, body):
            await begun.wait()
        assert count < 1000 and not engine.requests

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not JSON"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "an integer must have at most"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": "\xff"}', "not utf-8"),
        (b"null", "must be a JSON object, got null"),
    ],
)
def test_what_is_no_json_object_is_refused(body, message):
    client = make_client(ScriptedEngine("a"))
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


@loop_over("path", ["/v1/completions", "/v1/chat/completions", "/invocations"])
@loop_over("field", ["n", "best_of"])
@loop_over("number", ["2000000000", " 2000000000 ", "2_000_000_000", 2e9, "2e9"])
def test_a_number_is_limited_in_whatever_form_it_comes(path, field, number):
    client = make_client(ScriptedEngine("a"))
    fields = {"prompt": "a"} if path == "/v1/completions" else CHAT
    answer = client.post(path, json={**fields, field: number})
    assert answer.status_code == 400 and "(--max-n)" in answer.json()["error"]["message"]


@pytest.mark.parametrize("fields", [{"n": 8}, {"n": 1, "best_of": 8}])
def test_prompts_run_together_as_far_as_their_samples_fill_a_batch(fields, monkeypatch):
    found: list[int | None] = []

    def watched_merge(sources: Any, max_running: int | None = None) -> Any:
        found.append(max_running)
        return merge(sources, max_running)

    monkeypatch.setattr(serving, "merge", watched_merge)
    engine = ScriptedEngine("a")
    answer = make_client(engine).post("/v1/completions", json={"prompt": ["a", "b"], **fields})
    assert answer.status_code == 200, answer.text
    most = engine.vllm_config.scheduler.max_num_seqs
    assert found == [max(1, (most + most // 4) // 8)]


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"prompt_logprobs": 1, "n": 2}, 24),
        ({"prompt_logprobs": 3, "n": 1}, 24),
        ({"logprobs": 3, "echo": True, "n": 1}, 24),
        ({"prompt_logprobs": 0}, 6),
        ({"logprobs": 3, "echo": False}, 0),
    ],
)
def test_prompts_with_too_many_log_probabilities_are_refused(fields, count):
    body = {"prompt": [[5, 6], [5, 6, 7, 8]], "max_tokens": 1, **fields}
    for most in {max(count, 1), max(count - 1, 1)}:
        client = make_client(ScriptedEngine("a"), max_prompt_logprob_values=most)
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == (200 if count <= most else 400), answer.text
        if count > most:
            message = answer.json()["error"]["message"]
            assert f"are {count}, more than the {most}" in message
            assert "--max-prompt-logprob-values" in message


def holds_many(annotation: Any) -> bool:
    """Return whether a field of this type can be a list or an object of any size."""
    origin = get_origin(annotation)
    if origin in (list, dict) or annotation in (list, dict):
        return True
    return origin is not None and any(map(holds_many, get_args(annotation)))


OPEN_FIELDS = {
    *("chat_template_kwargs", "mm_processor_kwargs", "kv_transfer_params", "logits_processors"),
    *("guided_json", "response_format", "metadata", "tool_choice", "system", "stream_options"),
    *("output_format", "thread"),
    *("prompt_embeds", "additional_data"),
}
"""Objects whose shape is free: --max-request-values limits what they hold."""


def routes_with_bodies() -> list[Any]:
    found = [route for router in server_routers(ARGS) for route in router.routes]
    return [route for route in found if getattr(route, "body_field", None) is not None]


def kinds_of_bodies() -> set[Any]:
    return {
        kind
        for route in routes_with_bodies()
        for kind in body_classes(route.body_field.field_info.annotation)
    }


def test_every_list_of_every_route_has_a_limit_of_its_own():
    kinds = kinds_of_bodies()
    assert len(kinds) >= 10
    for kind in kinds:
        fields = {name for name, f in kind.model_fields.items() if holds_many(f.annotation)}
        assert fields - limits_of(kind).keys() <= OPEN_FIELDS, kind
    limited = {name for kind in kinds for name in limits_of(kind)}
    assert limited >= {"bad_words", "tools", "input"}


def test_every_route_with_a_body_reads_it_within_the_limits():
    assert [r.path for r in routes_with_bodies() if not isinstance(r, BodyRoute)] == []


def test_the_page_about_limits_names_every_limit_with_its_default():
    page = (Path(__file__).parents[3] / "docs" / "limits.md").read_text()
    rows = re.findall(r"\| ([\d,]+)(?: MiB)? \| `--([\w-]+)` \|", page)
    defaults = {name.replace("-", "_"): int(most.replace(",", "")) for most, name in rows}
    assert defaults.pop("max_logprobs") == ModelConfig(model="a").max_logprobs
    for name in ("max_request_bytes", "max_media_request_bytes"):
        assert defaults.pop(name) << 20 == getattr(ARGS, name)
    assert defaults.pop("limit_mm_per_prompt") == MultiModalConfig().limit("image").count
    assert {name: getattr(ARGS, name) for name in defaults} == defaults
    of_fields = [limits for kind in kinds_of_bodies() for limits in limits_of(kind).values()]
    settings = {limit.setting for limits in of_fields for limit in limits}
    assert settings and settings <= defaults.keys()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("{}", (2, 0)),
        ("[1, 2, 3]", (4, 0)),
        (r'{"a": "x:y,[\"", "b": [{}]}', (5, 2)),
        (r'["\\", ",", "\\\",["]', (4, 0)),
        ('"text: with, commas"', (1, 0)),
    ],
)
def test_values_are_counted_outside_of_texts(text, count):
    assert count_values(text.encode()) == count
