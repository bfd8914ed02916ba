"""Test forward passes that verify drafts on the simulated card: outputs are unchanged, and nothing
compiles after the warm-up.
"""

import random
from dataclasses import replace

import pytest

from tests.e2e.test_drafts import OracleSource, seen_by_user
from tests.hpu import FEW_BUCKETS, MODES, SMALL_ENGINE, simulated_hpu
from tests.reach import recorded_launches, runner_of
from vllm import SamplingParams
from vllm.bucketing import Phase
from vllm.config.speculative import DraftOptions
from vllm.core.drafting.lookup_drafts import NgramDrafts
from vllm.core.scheduler import Scheduler
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.llm_engine import LLMEngine
from vllm.sampling_params import GuidedDecodingParams

PROMPTS = [[20 + n] * n for n in (3, 16, 17, 40, 30, 5, 8)]
PARAMS = [
    SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, logprobs=1),
    SamplingParams(max_tokens=30, temperature=1.2, seed=7),
    SamplingParams(max_tokens=25, temperature=0.8, seed=3, top_p=0.8, min_tokens=9),
    SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, stop=["self"]),
    SamplingParams(max_tokens=12, temperature=0, repetition_penalty=1.3),
    SamplingParams(max_tokens=31, temperature=0, prompt_logprobs=1, logit_bias={300: 2.0}),
    SamplingParams(
        max_tokens=20,
        temperature=0,
        bad_words=["return x", "self."],
        guided_decoding=GuidedDecodingParams(regex="[a-z ]{8,} = [0-9]+"),
    ),
]


def make_engine(max_draft_tokens: int, is_eager: bool, num_blocks: int) -> LLMEngine:
    arguments = SMALL_ENGINE | {"num_gpu_blocks_override": num_blocks, "enforce_eager": is_eager}
    arguments |= {"sampling_warmup": "all"}
    config = EngineArgs(**arguments).create_engine_config()
    scheduler = replace(config.scheduler, max_draft_tokens=max_draft_tokens)
    return LLMEngine.from_vllm_config(replace(config, scheduler=scheduler))


def run(engine: LLMEngine, params: list[SamplingParams] = PARAMS) -> list:
    for index, (prompt, own) in enumerate(zip(PROMPTS, params, strict=True)):
        engine.add_request(str(index), {"prompt_token_ids": prompt}, own)
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[int(output.request_id)] = output
    return [found[index] for index in range(len(PROMPTS))]


@pytest.mark.exhaustive  # exhaustive: tests/e2e/test_every_draft.py tests drafts on a card
@pytest.mark.parametrize(("mode", "is_contiguous"), [("HPU graphs", True), ("eager", False)])
def test_users_get_the_same_with_drafts_as_without(mode, is_contiguous, monkeypatch):
    is_lazy, is_eager = MODES[mode]
    variables = FEW_BUCKETS | {"VLLM_CONTIGUOUS_PA": is_contiguous, "PT_HPU_LAZY_MODE": is_lazy}
    with simulated_hpu(has_profiling_run=False, **variables) as bridge:
        engine = make_engine(0, is_eager, 33)
        runner = runner_of(engine)
        assert all(b.query_len == 1 for b in runner.launches.planner.catalog.decode)
        outputs = run(engine)
        known = {tuple(o.prompt_token_ids): [list(o.outputs[0].token_ids)] for o in outputs}

        # 16 blocks can be used, so that a request is preempted.
        engine = make_engine(5, is_eager, 17)
        core = engine.engine_core
        runner = runner_of(core)
        assert {b.query_len for b in runner.launches.planner.catalog.decode} == {1, 6}
        source = OracleSource(random.Random(3), known)
        core.scheduler = Scheduler(core.config.scheduler, core.scheduler.cache, source)
        launches = recorded_launches(runner, monkeypatch)
        before = bridge.counters().compilations
        with_drafts = run(engine)
        options = DraftOptions(method="ngram", num_speculative_tokens=5, prompt_lookup_min=1)
        core.scheduler = Scheduler(
            core.config.scheduler, core.scheduler.cache, NgramDrafts(options)
        )
        with_ngrams = run(engine)
        assert core.scheduler.stats().drafts.num_draft_tokens > 10
        assert bridge.counters().compilations == before
    for found in (with_drafts, with_ngrams):
        assert [seen_by_user(o) for o in found] == [seen_by_user(o) for o in outputs]
    assert source.num_right > 20
    decodes = [launch for launch, _ in launches if launch.bucket.phase is Phase.DECODE]
    assert any(launch.num_drafts is not None for launch in decodes)
    for launch in decodes:
        assert launch.bucket.query_len == (1 if launch.num_drafts is None else 6)
