"""`--kv-cache-dtype`: a cache of eight-bit floats costs little, however requests are scheduled."""

import pytest

from tests.e2e.reference import random_prompts
from tests.hpu import FEW_BUCKETS, MODES, simulated_hpu
from vllm import LLM, SamplingParams

SETTINGS = {
    "whole prompts": {"max_num_batched_tokens": 1024},
    "chunks": {"max_num_batched_tokens": 32},
    "chunks, no prefix cache": {"max_num_batched_tokens": 32, "enable_prefix_caching": False},
    "preemption": {"max_num_batched_tokens": 1024, "num_gpu_blocks_override": 24},
}


def logprobs_of(prompts: list[list[int]], **settings) -> list[float]:
    """Of all tokens of all prompts but the first; each prompt comes twice."""
    settings = {"num_gpu_blocks_override": 400, "max_num_seqs": 32} | settings
    llm = LLM(dtype="bfloat16", skip_tokenizer_init=True, max_model_len=160, **settings)
    params = SamplingParams(max_tokens=16, ignore_eos=True, detokenize=False, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts * 2], params, use_tqdm=False)
    scheduler = llm.llm_engine.engine_core.scheduler
    assert (scheduler.num_preemptions > 0) == (settings["num_gpu_blocks_override"] == 24)
    return [
        entry[token].logprob
        for output in outputs
        for token, entry in zip(
            output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
        )
    ]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(12, 120, vocab_size=4096)


@pytest.fixture(scope="module")
def exact(prompts) -> list[float]:
    return logprobs_of(prompts)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("dtype", "error"), [("fp8", 0.1), ("fp8_e5m2", 0.2)])
def test_logprobs_are_near_those_of_the_exact_cache(prompts, exact, dtype, error, setting):
    got = logprobs_of(prompts, kv_cache_dtype=dtype, **SETTINGS[setting])
    errors = [abs(a - b) for a, b in zip(got, exact, strict=True)]
    assert 0 < sum(errors) / len(errors) < error


@pytest.mark.parametrize(
    ("card", "mode", "dtype", "error"),
    [
        ("gaudi3", "HPU graphs", "fp8_e5m2", 0.2),
        pytest.param("gaudi2", "HPU graphs", "fp8_inc", 0.1, marks=pytest.mark.exhaustive),
        pytest.param("gaudi3", "torch.compile", "fp8_e4m3", 0.1, marks=pytest.mark.exhaustive),
    ],
)
def test_a_simulated_card_keeps_an_fp8_cache(prompts, card, mode, dtype, error):
    """Prompts in chunks, so that the second half of a prompt reads the first from the cache."""
    longest, (is_lazy, enforce_eager) = max(prompts, key=len), MODES[mode]
    variables = {"PT_HPU_LAZY_MODE": is_lazy, **FEW_BUCKETS}
    settings = {
        "enforce_eager": enforce_eager,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "num_gpu_blocks_override": 65,
        "block_size": 16,
    }
    found = []
    for changes in ({}, {"kv_cache_dtype": dtype}):
        with simulated_hpu(card=card, has_profiling_run=False, **variables):
            found.append(logprobs_of([longest[:60]], **settings, **changes))
    errors = [abs(a - b) for a, b in zip(*found, strict=True)]
    assert 0 < sum(errors) / len(errors) < error
