"""Test a draft model on the simulated card: outputs are unchanged, nothing compiles after the
warm-up, and drafts are right if the two models agree.
"""

import itertools
import random

import pytest
import torch

from gaudi_sim.bridge import SimBridge
from tests.e2e.test_drafts import seen_by_user
from tests.hpu import FEW_BUCKETS, MODES, SMALL_ENGINE, simulated_hpu, steps_in_flight
from tests.reach import recorded_launches, runner_of, stats_of, steps_in_flight_of, worker_of
from tests.speculators import cut_last_layer
from tests.worker import test_hpu_drafts
from vllm import SamplingParams
from vllm.assets import BUNDLED_MODEL
from vllm.bucketing.ledger import MemoryClass
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.llm_engine import LLMEngine

PARAMS = [params.clone() for params in test_hpu_drafts.PARAMS]
for params in PARAMS:
    params.max_tokens = min(params.max_tokens, 14)


def make_engine(draft, mode, **more) -> LLMEngine:
    arguments = SMALL_ENGINE | {"enforce_eager": MODES[mode][1], "max_model_len": 64} | more
    arguments["sampling_warmup"] = "all"
    if draft is not None:
        speculative = {"model": str(draft), "num_speculative_tokens": 3, "adaptive": False}
        arguments["speculative_config"] = speculative
    return LLMEngine.from_vllm_config(EngineArgs(**arguments).create_engine_config())


def run(engine: LLMEngine) -> list:
    return [seen_by_user(output) for output in test_hpu_drafts.run(engine, PARAMS)]


def drafts_of(engine: LLMEngine) -> tuple[int, int]:
    stats = stats_of(engine).drafts
    return stats.num_draft_tokens, sum(stats.accepted)


def keep(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits


def run_and_leave(engine: LLMEngine) -> None:
    """Run requests that share prefixes and may be aborted at any time; some have no drafts."""
    rng, todo = random.Random(2), list(range(8))
    text = [rng.randrange(300, 400) for _ in range(45)]
    while todo or engine.has_unfinished_requests():
        if todo and rng.random() < 0.8:
            params = SamplingParams(max_tokens=rng.randint(1, 16), ignore_eos=True, seed=len(todo))
            if rng.random() < 0.4:
                params.logits_processors = [keep]  # requests with a logits processor get no drafts
            prompt = {"prompt_token_ids": text[: rng.choice([15, 30, 31, 45])]}
            engine.add_request(str(todo.pop()), prompt, params)
        if rng.random() < 0.1:
            engine.abort_request(str(rng.randrange(8)))
        engine.step()


def check_reads(engine: LLMEngine, bridge: SimBridge) -> None:
    """Check that the host waits for the card once for each forward pass of the model, and never for
    drafts.
    """
    before = bridge.counters().host_syncs
    with pytest.MonkeyPatch.context() as patch:
        launches = recorded_launches(runner_of(engine), patch)
        for seed in range(3):
            params = SamplingParams(max_tokens=12, ignore_eos=True, seed=seed)
            engine.add_request(str(seed), {"prompt_token_ids": [300 + seed] * 9}, params)
        while engine.has_unfinished_requests() or steps_in_flight_of(engine):
            engine.step()
    assert any(launch.num_drafts is not None for launch, _ in launches)
    assert bridge.counters().host_syncs - before == len(launches)


def check_ledger(engine: LLMEngine) -> None:
    worker = worker_of(engine)
    runners = worker.runner, worker.runner.drafter
    weight_bytes = sum(w.nbytes for runner in runners for w in runner.model.parameters())
    assert worker.ledger.booked(MemoryClass.WEIGHTS) >= weight_bytes
    block_bytes = sum(runner.cache_layout.block_bytes for runner in runners)
    num_blocks = engine.engine_core.config.cache.num_gpu_blocks_override
    assert worker.ledger.booked(MemoryClass.KV_CACHE) == num_blocks * block_bytes


RIGHT, WRONG, PARTLY = "right", "wrong", "partly right"


# Exhaustive: test_every_draft.py and test_drafts_right_and_wrong.py also test drafts on a card.
@pytest.mark.exhaustive
@pytest.mark.parametrize(("mode", "draft"), list(itertools.product(MODES, (RIGHT, WRONG, PARTLY))))
def test_users_get_the_same_with_a_draft_model_as_without(mode, draft, models, tmp_path):
    folder = {RIGHT: BUNDLED_MODEL, WRONG: models("opt")}.get(draft)
    if folder is None:
        folder = cut_last_layer(BUNDLED_MODEL, tmp_path / "draft")
    variables = FEW_BUCKETS | {"PT_HPU_LAZY_MODE": MODES[mode][0]}
    card = simulated_hpu(has_profiling_run=False, **variables)
    with card as bridge, steps_in_flight():
        expected = run(make_engine(None, mode))
        engine = make_engine(folder, mode, num_gpu_blocks_override=6)
        check_ledger(engine)
        before = bridge.counters().compilations
        assert run(engine) == expected
        assert run(engine) == expected, "with the prefix cache of both models"
        num_drafts, num_right = drafts_of(engine)
        check_reads(engine, bridge)
        run_and_leave(engine)
        assert bridge.counters().compilations == before
        stats = stats_of(engine)
        assert stats.num_preemptions and stats.num_prefix_hits
        more_drafts, more_right = drafts_of(engine)
    if draft == RIGHT:
        assert num_drafts > num_right > 0.5 * num_drafts > 30, "penalties are no part of drafts"
        assert more_drafts - num_drafts == more_right - num_right > 30, "and no others are wrong"
    else:
        assert num_drafts > 30
        assert num_right < 20 if draft == WRONG else 10 < num_right < 0.6 * num_drafts
