"""A latent cache against `transformers`: log-probabilities of prompts and outputs, in chunks, with
prefix hits and preemption, on the CPU and on the simulated card.
"""

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.e2e.logprob_checks import logprobs_of, wanted_logprobs
from tests.e2e.reference import Reference, generate, random_prompts
from tests.hpu import FEW_BUCKETS, MODES, simulated_hpu
from tests.reach import decode_step_of, runner_of, scheduler_of
from vllm import LLM, SamplingParams

MAX_TOKENS = 32
SETTINGS = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 160,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "enable_chunked_prefill": True,
    "block_size": 16,
    "num_gpu_blocks_override": 24,
}
"""So few blocks that requests are preempted."""


@pytest.fixture(scope="module")
def references(models):
    @cache
    def of(family: str) -> list[Reference]:
        prompts = random_prompts(12, 100, vocab_size=4096)
        return generate(models(family), prompts, MAX_TOKENS)

    return of


def run(folder: Path, prompts: list[list[int]], **settings) -> tuple[LLM, list]:
    llm = LLM(model=str(folder), **SETTINGS | settings)
    params = SamplingParams(
        temperature=0,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        prompt_logprobs=0,
    )
    return llm, llm.generate(prompts, params, use_tqdm=False)


def check(folder: Path, references: list[Reference], **settings) -> LLM:
    llm, outputs = run(folder, [r.prompt for r in references], **settings)
    for output, reference in zip(outputs, references, strict=True):
        assert list(output.outputs[0].token_ids) == reference.token_ids
    for got, reference in zip(logprobs_of(outputs), references, strict=True):
        torch.testing.assert_close(got, wanted_logprobs(reference), atol=1e-4, rtol=0)
    # From the cache, the second time.
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    longest = max(references, key=lambda r: len(r.prompt))
    for _ in range(2):
        (output,) = llm.generate([longest.prompt], params, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == longest.token_ids[:4]
    assert output.num_cached_tokens >= 64
    return llm


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3"])
def test_logprobs_are_those_of_transformers(family, models, references):
    llm = check(models(family), references(family))
    assert scheduler_of(llm).num_preemptions > 0


def test_a_model_type_by_another_published_name_is_the_same(models, references, tmp_path):
    folder = models("deepseek_v3")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "kimi_k2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    check(tmp_path, references("deepseek_v3"))


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("deepseek_v3", "HPU graphs"),
        pytest.param("deepseek_v2", "torch.compile", marks=pytest.mark.exhaustive),
    ],
)
def test_logprobs_are_those_of_transformers_on_the_simulated_card(family, mode, models, references):
    """The card is strict: it fails where a launch that was warmed up compiles."""
    is_lazy, enforce_eager = MODES[mode]
    with simulated_hpu(PT_HPU_LAZY_MODE=is_lazy, **FEW_BUCKETS) as bridge:
        before = bridge.counters()
        check(models(family), references(family)[:8], enforce_eager=enforce_eager)
        after = bridge.counters()
        assert after.cpu_fallbacks == before.cpu_fallbacks
        assert after.cache_copies == before.cache_copies


def test_steps_run_in_one_call_with_the_tokens_of_the_modules(models, references, monkeypatch):
    prompts = [reference.prompt for reference in references("deepseek_v3")]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=MAX_TOKENS, ignore_eos=True)
    params.detokenize = False

    def generate_all(is_fused: bool) -> list[list[int]]:
        llm = LLM(model=str(models("deepseek_v3")), **SETTINGS | {"dtype": "bfloat16"})
        outputs = llm.generate(prompts, params, use_tqdm=False)
        runner = runner_of(llm)
        assert (decode_step_of(runner) is not None) == is_fused
        return [output.outputs[0].token_ids for output in outputs]

    fused = generate_all(is_fused=True)
    monkeypatch.setattr("vllm.worker.cpu.launches.fuse", lambda *args: None)
    assert fused == generate_all(is_fused=False)
