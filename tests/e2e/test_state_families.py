"""Models with states (Mamba layers): the tokens of `transformers`, whatever becomes of a request.

Outputs are compared with one pass of `transformers` over prompt and output, without a cache, as its
cache is wrong after a prompt of one token.
"""

import logging
import random
from typing import Any

import pytest
import torch

from tests.e2e.reference import random_prompts
from tests.hpu import FEW_BUCKETS, MODES, simulated_hpu
from tests.reach import executor_of, scheduler_of, stats_of
from tests.reference_model import load_reference
from tests.tiny_models import STATE_FAMILIES
from vllm import LLM, SamplingParams
from vllm.engine import engine_core
from vllm.engine.run_ahead import RunAhead
from vllm.errors import ConfigError
from vllm.executor import uniproc
from vllm.outputs import RequestOutput

MAX_TOKENS = 32
LONGEST = 96
PARAMS = SamplingParams(
    temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False, logprobs=0
)
SETTINGS = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": LONGEST,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 40,
    "block_size": 16,
}
PROMPTS = random_prompts(24, LONGEST - MAX_TOKENS, vocab_size=4096)
WITHOUT_BLOCKS = ("mamba", "mamba2")
BUCKETS = FEW_BUCKETS | {
    "VLLM_PROMPT_BS_BUCKET_MIN": 2,
    "VLLM_PROMPT_BS_BUCKET_MAX": 2,
    "VLLM_DECODE_BS_BUCKET_MIN": 8,
}
"""Prompts beyond 32 tokens are launched in pieces, two rows at a time."""
FEWER_TO_COMPILE = {
    "VLLM_DECODE_BLOCK_BUCKET_MIN": 64,
    "VLLM_DECODE_BLOCK_BUCKET_STEP": 64,
    "VLLM_REGIONAL_COMPILATION": False,
}
MORE_CASES = (
    *((family, "HPU graphs") for family in ("granite_hybrid", "granite_hybrid_dense", "mamba2")),
    *((family, mode) for family in ("granite_hybrid", "mamba") for mode in ("lazy", "eager")),
    *((family, "torch.compile") for family in STATE_FAMILIES),
)


@torch.inference_mode()
def assert_is_greedy(reference: Any, output: RequestOutput) -> None:
    """Every token is the likeliest one after those before it, and has its log-probability."""
    (completion,), prompt = output.outputs, output.prompt_token_ids
    assert len(completion.token_ids) == MAX_TOKENS
    token_ids = torch.tensor([[*prompt, *completion.token_ids]])
    logprobs = reference(token_ids).logits[0].float().log_softmax(-1)
    want = logprobs[len(prompt) - 1 : -1]
    got = torch.tensor(completion.token_ids)
    chosen = want.gather(1, got[:, None])[:, 0]
    assert (want.max(-1).values - chosen).max() < 1e-4
    assert completion.logprobs is not None
    pairs = zip(completion.logprobs, completion.token_ids, strict=True)
    ours = torch.tensor([entry[token].logprob for entry, token in pairs])
    torch.testing.assert_close(ours, chosen, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_a_state_is_that_of_its_request(family, models, monkeypatch):
    """Prompts in chunks, preemption, rows that change hands, and a step in flight all the time."""
    monkeypatch.setattr(engine_core, "RunAhead", lambda allowed: RunAhead(allowed, 0))
    monkeypatch.setattr(uniproc, "has_core_to_spare", lambda: True)
    engine = LLM(model=str(models(family)), **SETTINGS, num_gpu_blocks_override=20).llm_engine
    rng, todo, outputs = random.Random(1), list(enumerate(PROMPTS)), {}
    aborted = set()
    while todo or engine.has_unfinished_requests():
        for _ in range(min(len(todo), rng.randint(0, 5))):
            index, prompt = todo.pop()
            engine.add_request(str(index), {"prompt_token_ids": prompt}, PARAMS)
            if index % 4 == 3:
                engine.add_request(f"gone {index}", {"prompt_token_ids": prompt[::-1]}, PARAMS)
                aborted.add(f"gone {index}")
        if aborted and rng.random() < 0.1:
            engine.abort_request(aborted.pop())
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = output
    scheduler = scheduler_of(engine)
    assert executor_of(engine).is_asynchronous
    assert (scheduler.num_preemptions > 0) == (family not in WITHOUT_BLOCKS)
    assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_usable_blocks
    assert len([name for name in outputs if "gone" not in name]) == len(PROMPTS)
    reference = load_reference(models(family))
    for output in outputs.values():
        assert_is_greedy(reference, output)


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("bamba", "HPU graphs"),
        ("mamba", "HPU graphs"),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE_CASES),
    ],
)
def test_states_on_a_simulated_card_are_the_same(family, mode, models):
    """Prompts in pieces, several in a launch, preemption; nothing compiles after the warm-up."""
    is_lazy, is_eager = MODES[mode]
    buckets = BUCKETS | (FEWER_TO_COMPILE if mode == "torch.compile" else {})
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=is_lazy, **buckets) as bridge:
        settings = SETTINGS | {"enforce_eager": is_eager, "num_gpu_blocks_override": 20}
        llm = LLM(model=str(models(family)), sampling_warmup="all", **settings)
        before = bridge.counters()
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        after = bridge.counters()
    assert after.compilations == before.compilations
    assert after.cpu_fallbacks == before.cpu_fallbacks
    assert (mode == "HPU graphs") == (after.graph_replays > before.graph_replays)
    scheduler = scheduler_of(llm)
    assert (scheduler.num_preemptions > 0) == (family not in WITHOUT_BLOCKS)
    reference = load_reference(models(family))
    for output in outputs:
        assert_is_greedy(reference, output)


def test_prompts_end_to_end_would_mix_states_up(models):
    with simulated_hpu(VLLM_MERGED_PREFILL=1), pytest.raises(ConfigError, match="mix them up"):
        LLM(model=str(models("mamba")), **SETTINGS)


def test_what_states_do_not_allow_is_off_and_said(models, caplog):
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    with caplog.at_level(logging.INFO, logger="vllm"):
        llm = LLM(model=str(models("bamba")), **SETTINGS, speculative_config=drafts)
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if line.startswith("prefix caching is off")]) == 1
    assert len([line for line in said if line.startswith("speculative_config has no")]) == 1
    again = [5, 6, 7, 8] * 10
    first, second = (
        llm.generate({"prompt_token_ids": again}, PARAMS, use_tqdm=False)[0] for _ in range(2)
    )
    assert second.num_cached_tokens == 0
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert stats_of(llm).drafts.num_drafts == 0
