"""Test that requests with drafts can be aborted between any two steps, or preempted: no other
request changes, and no block is lost.
"""

import itertools
import random

import pytest

from tests.e2e.test_every_draft import (
    KINDS,
    METHODS,
    PROMPTS,
    cases,
    expected,
    make_llm,
    params_of,
    seen_by_user,
)
from tests.executor.thread_ranks import ThreadRanks
from tests.hpu import FEW_BUCKETS, simulated_hpu, steps_in_flight
from tests.reach import core_of
from vllm import LLM
from vllm.engine import engine_core
from vllm.executor import uniproc

__all__ = ["cases"]


def run_and_abort(llm: LLM, seed: int, count: int) -> dict[str, list[list]]:
    """Run `count` requests of each kind and abort half of them. Return the outputs of the others,
    by kind.
    """
    engine, rng = llm.llm_engine, random.Random(seed)
    names = [f"{kind}/{index}" for kind in KINDS for index in range(count)]
    rng.shuffle(names)
    victims = set(rng.sample(names, len(names) // 2))
    todo, running, got = list(names), set(), {kind: [] for kind in KINDS}
    while todo or engine.has_unfinished_requests():
        for _ in range(min(len(todo), rng.randint(0, 3))):
            name = todo.pop()
            kind = name.partition("/")[0]
            engine.add_request(name, {"prompt_token_ids": PROMPTS[kind]}, params_of(kind))
            running.add(name)
        if rng.random() < 0.4 and (some := sorted(victims & running)):
            chosen = rng.choice(some)
            engine.abort_request(chosen)
            running.discard(chosen)
        for output in engine.step():
            if output.finished:
                running.discard(output.request_id)
                if output.request_id not in victims:
                    got[output.request_id.partition("/")[0]].append(seen_by_user(output))
    assert sum(map(len, got.values())) == len(names) - len(victims)
    return got


def check(llm: LLM, want: dict[str, list], counts: tuple[int, ...]) -> None:
    core = core_of(llm)
    for seed, count in enumerate(counts):
        for kind, found in run_and_abort(llm, seed, count).items():
            for each in found:
                assert each == want[kind], kind
    # Run the steps that are still in flight after all requests were aborted.
    while core.has_unfinished_requests():
        core.step()
    scheduler = core.scheduler
    assert scheduler.num_preemptions and sum(core.stats().drafts.accepted) > 5
    assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_usable_blocks
    assert not len(scheduler.running)


ALONE, TWO_RANKS, TWO_STAGES = {}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
LAYOUTS = {"one rank": ALONE, "two ranks": TWO_RANKS, "two stages": TWO_STAGES}
SHORT = {
    ("eagle3", "two ranks"),
    ("medusa", "one rank"),
}
ON_HOST = [
    pytest.param(*case, marks=[] if case in SHORT else pytest.mark.exhaustive)
    for case in itertools.product(METHODS, LAYOUTS)
]


@pytest.mark.parametrize(("method", "layout"), ON_HOST)
def test_requests_are_aborted_between_steps(method, layout, cases, monkeypatch):
    wanted = expected(cases[method].target)  # an engine of its own, without the settings below
    if layout == "one rank":
        monkeypatch.setattr(uniproc, "has_core_to_spare", lambda: True)
    else:
        monkeypatch.setattr(engine_core, "make_executor", ThreadRanks)
    with steps_in_flight():
        llm = make_llm(cases[method], **LAYOUTS[layout])
        check(llm, wanted, (2,))
        core_of(llm).shutdown()


# Exhaustive: test_every_draft.py tests drafts, test_parallel_hpu_faults.py tests aborts.
@pytest.mark.exhaustive
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_ahead", [True, False])
def test_requests_are_aborted_between_steps_of_the_simulated_card(method, is_ahead, cases):
    wanted = expected(cases[method].target)  # an engine for the CPU must not run inside
    card = simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **FEW_BUCKETS)
    with card as bridge, steps_in_flight():
        llm = make_llm(cases[method], sampling_warmup="all", async_scheduling=is_ahead)
        before = bridge.counters().compilations
        check(llm, wanted, (2,) if is_ahead else (1, 1))
        assert bridge.counters().compilations == before
