"""Test that evicted prefixes come back from host memory and files with the same tokens, and that
blocks of damaged files are computed again.
"""

import asyncio
import json
import random
import runpy
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.testclient import TestClient

from tests.e2e.server import ROOT
from tests.executor.thread_ranks import ThreadRanks
from tests.reach import (
    connector_of,
    forget_host_blocks,
    pool_of,
    port_of,
    scheduler_of,
    stats_of,
    wait_for_writes,
)
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.block_folder import BlockFolder
from vllm.engine import engine_core
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.llm_engine import LLMEngine
from vllm.errors import ConfigError
from vllm.model_executor.model_memory import model_storages

pytestmark = pytest.mark.e2e

PREFIX = "import os\nimport sys\ndef foo(a, b):\n    return a + b\n" * 12
PROMPTS = [f"# file {number}\n{PREFIX}" for number in range(6)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SMALL = {"max_model_len": 512, "num_gpu_blocks_override": 70, "max_num_seqs": 2}
"""A cache that holds the blocks of three of the prompts."""


def generate(llm) -> tuple[list[list[int]], list[int]]:
    """Return the tokens, and the number of cached tokens of each prompt."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [o.outputs[0].token_ids for o in outputs], [o.num_cached_tokens for o in outputs]


def transfer(connector, folder=None, **fields):
    name = "shared_storage_path" if connector == "SharedStorageConnector" else "folder"
    extra = {} if folder is None else {name: str(folder)}
    return {"kv_connector": connector, "kv_connector_extra_config": extra, **fields}


@pytest.fixture(scope="module")
def expected():
    llm = LLM(**SMALL)
    tokens, _ = generate(llm)
    again, cached = generate(llm)
    assert again == tokens and not any(cached)  # all blocks were evicted
    return tokens


def test_an_evicted_prefix_comes_back_from_host_memory(expected):
    # All requests wait at the same time, and the cache has room for some of them.
    settings = SMALL | {"max_num_seqs": 32}
    llm = LLM(**settings, kv_transfer_config=transfer("OffloadingConnector"))
    assert generate(llm) == (expected, [0] * len(PROMPTS))
    tokens, cached = generate(llm)
    assert tokens == expected and all(cached)
    stats = stats_of(llm).transfer
    assert stats.num_hits == sum(cached) and stats.num_queries == 2 * stats.num_hits
    assert 0 < stats.num_loaded_bytes < stats.num_saved_bytes
    assert llm.reset_prefix_cache()
    tokens, cached = generate(llm)
    # The weights are the same, so the files are still valid.
    assert tokens == expected and all(cached)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_every_rank_has_its_part_of_a_block(sizes, expected, monkeypatch):
    monkeypatch.setattr(engine_core, "make_executor", ThreadRanks)
    parallel = dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), sizes, strict=True))
    config = transfer("OffloadingConnector")
    llm = LLM(**SMALL, **parallel, dtype="float32", kv_transfer_config=config)
    tokens, _ = generate(llm)
    again, cached = generate(llm)
    assert again == tokens and all(cached)


def test_files_outlive_the_engine_and_damaged_ones_are_computed_again(expected, tmp_path):
    config = transfer("OffloadingConnector", tmp_path)
    llm = LLM(**SMALL, kv_transfer_config=config)
    assert generate(llm)[0] == expected
    llm.llm_engine.shutdown()
    llm = LLM(**SMALL, kv_transfer_config=config)
    tokens, cached = generate(llm)
    assert tokens == expected and all(cached)
    llm.llm_engine.shutdown()

    rng, files = random.Random(1), sorted(tmp_path.rglob("*.kv"))
    assert len(files) > 60
    for path in files:
        data = bytearray(path.read_bytes())
        if rng.random() < 0.5:
            data[rng.randrange(len(data))] ^= 255
        if rng.random() < 0.2:
            del data[len(data) // 2 :]
        path.write_bytes(data)
    llm = LLM(**SMALL, kv_transfer_config=config)
    assert generate(llm)[0] == expected
    assert generate(llm)[0] == expected
    # With other weights, the blocks in the files are not valid.
    llm.llm_engine.shutdown()
    llm = LLM(**SMALL, kv_transfer_config=config, dtype="float32")
    assert not any(generate(llm)[1])


def test_new_weights_have_blocks_of_their_own(tmp_path, capsys):
    config = transfer("OffloadingConnector", tmp_path)
    llm = LLM(**SMALL, kv_transfer_config=config)
    generate(llm)
    wait_for_writes(llm)
    files = set(tmp_path.rglob("*.kv"))

    def change(worker):
        with torch.no_grad():
            for storage in model_storages(worker.model)[:1]:
                storage.view(torch.uint8)[:64] ^= 1

    llm.collective_rpc(change)
    generate(llm)
    # Nothing is saved: blocks in the cache may be of the old or of the new weights.
    assert set(tmp_path.rglob("*.kv")) == files
    assert "no KV blocks are saved until reset_prefix_cache" in capsys.readouterr().err
    assert llm.reset_prefix_cache()
    _, cached = generate(llm)
    assert not any(cached)
    llm.llm_engine.shutdown()
    new = set(tmp_path.rglob("*.kv")) - files
    assert new and {path.parents[1] for path in new}.isdisjoint(p.parents[1] for p in files)


def test_one_engine_computes_prompts_for_another(expected, tmp_path):
    producer = transfer("SharedStorageConnector", tmp_path, kv_role="kv_producer")
    consumer = transfer("SharedStorageConnector", tmp_path, kv_role="kv_consumer")
    one, other = (LLM(**SMALL, kv_transfer_config=config) for config in (producer, consumer))
    one.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    files = set(tmp_path.rglob("*.kv"))
    tokens, cached = generate(other)
    assert tokens == expected and all(cached)
    assert set(tmp_path.rglob("*.kv")) == files  # a consumer saves nothing
    for path in files:
        path.unlink()  # without its files, the producer is lost
    assert generate(other)[0] == expected


def test_others_go_on_while_the_files_of_a_request_are_written(expected, tmp_path, monkeypatch):
    """The request finishes when its files are written, with all of its tokens."""
    config = transfer("SharedStorageConnector", tmp_path, kv_role="kv_producer")
    engine = LLM(**SMALL, kv_transfer_config=config).llm_engine
    go, write = threading.Event(), BlockFolder.write
    monkeypatch.setattr(BlockFolder, "write", lambda *args: (go.wait(60), write(*args)))
    for name, prompt, max_tokens in (("short", 0, 2), ("gone", 2, 2), ("long", 1, 12)):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(name, PROMPTS[prompt], params)
    told, final = {"short": 0, "gone": 0, "long": 0}, {}

    def step():
        for output in engine.step():
            told[output.request_id] = len(output.outputs[0].token_ids)
            if output.finished:
                final[output.request_id] = output.outputs[0].token_ids

    while scheduler_of(engine).num_unfinished_requests:
        step()
    assert told == {"short": 1, "gone": 1, "long": 11} and not final
    assert engine.has_unfinished_requests() and not list(tmp_path.rglob("*.kv"))
    step()  # the engine waits for the files for a short time only
    engine.abort_request("gone")
    go.set()
    while engine.has_unfinished_requests():
        step()
        assert not final or list(tmp_path.rglob("*.kv"))
    assert final == {"short": expected[0][:2], "long": expected[1]}
    engine.shutdown()


def test_an_engine_gets_prompts_of_another_one_over_tcp_and_does_without_it(expected):
    producer = {"kv_connector": "TCPConnector", "kv_role": "kv_producer", "kv_port": 0}
    one = LLM(**SMALL, kv_transfer_config=producer)
    port = port_of(connector_of(one))
    consumer = {**producer, "kv_role": "kv_consumer", "kv_port": port}
    other = LLM(**SMALL, kv_transfer_config=consumer)
    one.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    tokens, cached = generate(other)
    assert tokens == expected and all(cached)
    one.llm_engine.shutdown()
    forget_host_blocks(other)
    assert other.reset_prefix_cache()
    tokens, cached = generate(other)
    assert tokens == expected and not all(cached)


class NeverStarts(ThreadRanks):
    """Workers whose start fails the test."""

    def start_workers(self):
        raise AssertionError("the model is loaded")


def test_an_address_in_use_is_reported_before_the_model_is_loaded(monkeypatch):
    monkeypatch.setattr(engine_core, "make_executor", NeverStarts)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = {"kv_connector": "TCPConnector", "kv_role": "kv_producer"}
        config["kv_port"] = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="kv_port to a free port"):
            LLM(**SMALL, kv_transfer_config=config)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_tokens_are_the_same_under_random_load(tmp_path, seed):
    """The load has preemption, aborts, shared prefixes and little memory."""
    config = {"max_model_len": 256, "num_gpu_blocks_override": 40, "max_num_seqs": 4}
    plain = LLMEngine.from_engine_args(EngineArgs(**config))
    kept = LLMEngine.from_engine_args(
        EngineArgs(
            **config,
            kv_transfer_config=transfer("OffloadingConnector", tmp_path, kv_buffer_size=300_000),
        )
    )
    rng = random.Random(seed)
    starts = [[rng.randrange(5, 500) for _ in range(rng.randrange(20, 120))] for _ in range(4)]
    todo = [
        (
            f"r{number}",
            [*rng.choice(starts), *(rng.randrange(5, 500) for _ in range(rng.randrange(1, 30)))],
            SamplingParams(
                temperature=rng.choice((0, 1.0)),
                seed=number,
                max_tokens=rng.randrange(1, 60),
                ignore_eos=True,
            ),
        )
        for number in range(60)
    ]
    expected = run(plain, todo, random.Random(0))
    found = run(kept, todo, random.Random(0))
    both = expected.keys() & found.keys()
    assert len(both) > 30
    assert {name: found[name] for name in both} == {name: expected[name] for name in both}
    pool = pool_of(kept)
    assert pool.num_free == pool.num_usable_blocks
    assert stats_of(kept).num_prefix_hits > stats_of(plain).num_prefix_hits
    plain.shutdown()
    kept.shutdown()


def run(engine, todo, rng) -> dict[str, list[int]]:
    """Return the tokens of the requests that were not aborted."""
    left, done = list(reversed(todo)), {}
    while left or engine.has_unfinished_requests():
        for _ in range(rng.randrange(4)):
            if left:
                name, prompt, params = left.pop()
                engine.add_request(name, {"prompt_token_ids": prompt}, params)
                if rng.random() < 0.1:
                    engine.abort_request(name)
        for output in engine.step():
            if output.finished and output.outputs[0].finish_reason == "length":
                done[output.request_id] = output.outputs[0].token_ids
    return done


class Backend(ThreadingHTTPServer):
    """A server that records the requests that it gets, and answers with their content."""

    daemon_threads = True

    def __init__(self, hangs: bool = False) -> None:
        self.asked: list[tuple[str, dict | None]] = []
        self.is_asked, self.is_left = threading.Event(), threading.Event()
        backend = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                backend.asked.append((self.path, json.loads(body) if body[:1] == b"{" else None))
                backend.is_asked.set()
                if hangs:
                    assert self.connection.recv(1) == b""
                    backend.is_left.set()
                    return
                self.send_response(400 if body == b"wrong" else 200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("retry-after", "7")
                self.end_headers()
                self.wfile.write(b"data: " + body)

            def do_GET(self) -> None:
                backend.asked.append((self.path, None))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture(scope="module")
def router_example():
    return runpy.run_path(str(ROOT / "examples" / "disaggregated_prefill" / "router.py"))


def test_the_router_of_the_example_asks_both_engines_and_does_without_the_first(
    router_example, capsys
):
    prefill, decode = Backend(), Backend()
    router = router_example["Router"]([prefill.url], [decode.url])
    routes = [Route("/{path:path}", router.handle, methods=["GET", "POST"])]
    body = {"prompt": "x", "max_tokens": 9, "stream": True, "stream_options": {}, "n": 2}
    with TestClient(Starlette(routes=routes, lifespan=router.lifespan)) as client:
        answer = client.post("/v1/completions", json=body)
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["retry-after"] == "7"
        assert json.loads(answer.text.removeprefix("data: ")) == body
        assert prefill.asked == [
            ("/v1/completions", {"prompt": "x", "max_tokens": 1, "stream": False})
        ]
        assert client.get("/v1/models?x=1").status_code == 200
        assert client.post("/v1/chat/completions", content=b"wrong").status_code == 400
        prefill.shutdown()
        prefill.server_close()
        for _ in range(2):  # the second time, the engine does not ask the lost producer
            assert client.post("/v1/completions", json=body).status_code == 200
        assert [path for path, _ in decode.asked] == [
            *("/v1/completions", "/v1/models?x=1", "/v1/chat/completions"),
            *("/v1/completions", "/v1/completions"),
        ]
        assert capsys.readouterr().out.count("the prompt was not computed ahead") == 2
        decode.shutdown()
        decode.server_close()
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 502
        assert "no decode server answers" in answer.json()["error"]["message"]


def test_servers_behind_the_router_take_turns_and_a_lost_one_is_left_out(router_example):
    prefill, decode = [Backend(), Backend()], [Backend(), Backend()]
    router = router_example["Router"]([each.url for each in prefill], [each.url for each in decode])
    routes = [Route("/{path:path}", router.handle, methods=["GET", "POST"])]
    with TestClient(Starlette(routes=routes, lifespan=router.lifespan)) as client:
        asked = {"input": "x", "max_output_tokens": 9}
        for _ in range(2):
            assert client.post("/v1/responses", json=asked).status_code == 200
        for backend in prefill:
            ((_, sent),) = backend.asked
            assert sent["max_output_tokens"] == 1 and not sent["store"] and sent["input"] == "x"
        assert [backend.asked for backend in decode] == [[("/v1/responses", asked)]] * 2
        decode[0].shutdown()
        decode[0].server_close()
        for _ in range(2):
            assert client.get("/v1/models").status_code == 200
        assert len(decode[1].asked) == 3
    for backend in (*prefill, decode[1]):
        backend.shutdown()
        backend.server_close()


@pytest.mark.parametrize("hangs", ["prefill", "decode"])
def test_a_client_that_leaves_the_router_ends_its_request(router_example, hangs):
    prefill, decode = (Backend(hangs=name == hangs) for name in ("prefill", "decode"))
    waiting = prefill if hangs == "prefill" else decode
    parts = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive():
        if parts:
            return parts.pop()
        await asyncio.to_thread(waiting.is_asked.wait, 60)
        return {"type": "http.disconnect"}

    async def leave():
        router = router_example["Router"]([prefill.url], [decode.url])
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        scope |= {"query_string": b"", "server": ("router", 80), "scheme": "http"}
        async with router.lifespan(None):
            answer = await router.handle(Request(scope, receive))
            assert answer.status_code == 499
            assert await asyncio.to_thread(waiting.is_left.wait, 60)

    asyncio.run(leave())
    assert len(decode.asked) == (hangs == "decode")
    for backend in (prefill, decode):
        backend.shutdown()
        backend.server_close()
