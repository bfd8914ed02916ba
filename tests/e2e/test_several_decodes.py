"""Test steps with sixteen decodes: the outputs are the same as with one decode.

Requests mix all kinds of sampling, adapters, grammars and stop strings, and are added and aborted
at any time.
"""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_every_draft import COMMON, KINDS, PROMPTS, params_of, seen_by_user
from tests.e2e.test_random_load import count_decodes
from tests.hpu import FEW_BUCKETS, simulated_hpu
from tests.lora_files import ALL, write_adapter
from tests.speculators import make_target, write_tokenizer
from vllm import LLM
from vllm.executor import uniproc
from vllm.lora.request import LoRARequest

ENGINE = COMMON | {"num_gpu_blocks_override": 60, "enable_lora": True, "max_loras": 1}
NAMES = [f"{kind}/{base}" for kind, base in itertools.product(KINDS, ("model", "adapter"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("several decodes")
    write_tokenizer(make_target(root / "target"))
    write_adapter(root / "adapter", str(root / "target"), 1, 4, ALL, size=0.2)
    return root


def make_llm(folder: Path, **more: Any) -> LLM:
    return LLM(str(folder / "target"), **ENGINE, **more)


def run_load(llm: LLM, folder: Path, victims: set[str], rng: random.Random) -> dict[str, list]:
    """Return what users see of each request that was not aborted, by the name of the request."""
    engine, adapter = llm.llm_engine, LoRARequest("a", 1, str(folder / "adapter"))
    core, todo, running, got = engine.engine_core, list(NAMES), set(), {}
    rng.shuffle(todo)
    while todo or core.has_unfinished_requests():
        for _ in range(min(len(todo), rng.choice([0, 0, 0, 0, 1, 3]))):
            name = todo.pop()
            kind, _, base = name.partition("/")
            prompt, own = (
                {"prompt_token_ids": PROMPTS[kind]},
                adapter if base == "adapter" else None,
            )
            engine.add_request(name, prompt, params_of(kind), lora_request=own)
            running.add(name)
        if rng.random() < 0.2 and (some := sorted(victims & running)):
            engine.abort_request(some[0])
            running.discard(some[0])
        for output in engine.step():
            if output.finished and output.request_id not in victims:
                got[output.request_id] = seen_by_user(output)
    pool = core.scheduler.cache.pool
    assert pool.num_free == pool.num_usable_blocks
    assert got.keys() == set(NAMES) - victims
    return got


@pytest.fixture(scope="module")
def expected(folder) -> dict[str, list]:
    llm = make_llm(folder, device="cpu", async_scheduling=False)
    found = run_load(llm, folder, set(), random.Random(0))
    assert found["greedy/model"] != found["greedy/adapter"]
    return {
        name: [*exact, pytest.approx(logprobs, abs=1e-3)]
        for name, (*exact, logprobs) in found.items()
    }


def check(llm: LLM, folder: Path, expected: dict[str, list]) -> None:
    rng, num_decodes = random.Random(1), count_decodes(llm.llm_engine)
    for _ in range(2):
        victims = set(rng.sample(NAMES, 8))
        for name, found in run_load(llm, folder, victims, rng).items():
            assert found == expected[name], name
    # A step may have up to 16 decodes when four ordinary requests run and no request waits.
    assert max(num_decodes) > 4 and num_decodes.count(1) > 20


@pytest.mark.parametrize("is_ahead", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_many_decodes_in_a_step_change_nothing(is_ahead, folder, expected, monkeypatch):
    monkeypatch.setattr(uniproc, "has_core_to_spare", lambda: is_ahead)
    check(make_llm(folder, num_scheduler_steps=16), folder, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_ahead", [False, True])
def test_nor_do_they_on_the_simulated_card(is_ahead, folder, expected):
    card = simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **FEW_BUCKETS)
    with card as bridge:
        llm = make_llm(
            folder, num_scheduler_steps=16, async_scheduling=is_ahead, sampling_warmup="all"
        )
        before = bridge.counters().compilations
        check(llm, folder, expected)
        assert bridge.counters().compilations == before
