"""Test `--kv-cache-dtype`: a cache in FP8 changes outputs little, in any schedule."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.reference import random_prompts
from tests.hpu import FEW_BUCKETS, MODES, simulated_hpu
from tests.reach import scheduler_of
from tests.tiny_models import make_tiny_model
from vllm import LLM, SamplingParams

SETTINGS = {
    "whole prompts": {"max_num_batched_tokens": 1024},
    "chunks": {"max_num_batched_tokens": 32},
    "chunks, no prefix cache": {"max_num_batched_tokens": 32, "enable_prefix_caching": False},
    "preemption": {"max_num_batched_tokens": 1024, "num_gpu_blocks_override": 24},
}


def scales_of(worker) -> list[float]:
    """Return the scales of all layers and heads."""
    layers = worker.runner.attention_layers
    return [x for each in layers for s in (each.key_scales, each.value_scales) for x in s.tolist()]


def logprobs_of(prompts: list[list[int]], **settings) -> list[float]:
    """Return the log-probabilities of all prompt tokens except the first; each prompt runs
    twice.
    """
    settings = {"num_gpu_blocks_override": 400, "max_num_seqs": 32} | settings
    llm = LLM(dtype="bfloat16", skip_tokenizer_init=True, max_model_len=160, **settings)
    scales = llm.collective_rpc(scales_of)[0]
    is_calculated = settings.get("calculate_kv_scales", False)
    assert (sorted(set(scales)) == [1.0]) is not is_calculated
    params = SamplingParams(max_tokens=16, ignore_eos=True, detokenize=False, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts * 2], params, use_tqdm=False)
    scheduler = scheduler_of(llm)
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


def test_calculated_scales_are_those_of_the_next_start(prompts, exact):
    settings = {"kv_cache_dtype": "fp8", "calculate_kv_scales": True, **SETTINGS["chunks"]}
    got = logprobs_of(prompts, **settings)
    errors = [abs(a - b) for a, b in zip(got, exact, strict=True)]
    assert 0 < sum(errors) / len(errors) < 0.1
    assert logprobs_of(prompts, **settings) == got


def calculated_scales(folder, **settings) -> list[float]:
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        max_model_len=160,
        num_gpu_blocks_override=40,
        **{"kv_cache_dtype": "fp8", "calculate_kv_scales": True, **settings},
    )
    return llm.collective_rpc(scales_of)[0]


def test_scales_of_a_checkpoint_are_not_calculated(tmp_path, caplog):
    folder = make_tiny_model("llama", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_scale"] = torch.tensor([0.5, 0.25])
    save_file(tensors, folder / "model.safetensors")
    scales = calculated_scales(folder)  # the model has 3 layers of 2 heads
    assert scales[4:8] == [0.5, 0.25, 1.0, 1.0]
    assert 1.0 not in scales[:4] + scales[8:]
    assert calculated_scales(folder, kv_cache_dtype="auto")[0] == 1.0
    assert "calculate_kv_scales has no effect" in caplog.text


@pytest.mark.parametrize("level", [1, 2])
def test_scales_stay_while_an_engine_sleeps_and_reads_its_weights_again(prompts, level):
    settings = {"kv_cache_dtype": "fp8", "calculate_kv_scales": True, "enable_sleep_mode": True}
    llm = LLM(skip_tokenizer_init=True, max_model_len=160, num_gpu_blocks_override=40, **settings)
    params = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)

    def tokens() -> list[int]:
        prompt = {"prompt_token_ids": max(prompts, key=len)}
        return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids

    scales, before = llm.collective_rpc(scales_of), tokens()
    llm.sleep(level=level)
    llm.wake_up()
    if level == 2:
        llm.collective_rpc("reload_weights")
    assert llm.collective_rpc(scales_of) == scales
    assert tokens() == before


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory) -> str:
    return str(make_tiny_model("deepseek_v2", tmp_path_factory.mktemp("latent") / "model"))


@pytest.mark.parametrize("calculates", [False, True])
def test_a_latent_cache_is_near_the_exact_one(latent_model, calculates):
    model = {"model": latent_model}
    random = random_prompts(4, 60, vocab_size=4096)
    exact = logprobs_of(random, **model)
    changes = {"kv_cache_dtype": "fp8", "calculate_kv_scales": calculates}
    got = logprobs_of(random, **model, **changes, **SETTINGS["chunks"])
    errors = [abs(a - b) for a, b in zip(got, exact, strict=True)]
    # The choice of experts changes with small differences; log-probabilities then differ by up to
    # 1.3.
    assert 0 < sum(errors) / len(errors) < 0.2


@pytest.mark.parametrize(
    ("card", "mode", "changes", "error"),
    [
        ("gaudi2", "HPU graphs", {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}, 0.1),
        pytest.param(
            *("gaudi3", "HPU graphs", {"kv_cache_dtype": "fp8_e5m2"}, 0.2),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            *("gaudi2", "HPU graphs", {"kv_cache_dtype": "fp8_inc"}, 0.1),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            *("gaudi3", "torch.compile", {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}),
            0.1,
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_simulated_card_keeps_an_fp8_cache(prompts, card, mode, changes, error):
    """Prompts run in chunks, so the second half of a prompt reads the first half from the cache."""
    check_card(card, mode, max(prompts, key=len)[:60], changes, error)


def test_a_simulated_card_keeps_a_latent_cache_in_fp8(latent_model):
    prompt = max(random_prompts(4, 60, vocab_size=4096), key=len)
    changes = {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}
    check_card("gaudi2", "HPU graphs", prompt, changes, 0.2, model=latent_model)


def check_card(card, mode, prompt, changes, error, **model) -> None:
    """Check that log-probabilities with an FP8 cache are close to the ones with an exact cache."""
    is_lazy, enforce_eager = MODES[mode]
    variables = {"PT_HPU_LAZY_MODE": is_lazy, **FEW_BUCKETS}
    settings = {
        "enforce_eager": enforce_eager,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "num_gpu_blocks_override": 65,
        "block_size": 16,
    }
    found = []
    for each in ({}, changes):
        with simulated_hpu(card=card, has_profiling_run=False, **variables):
            found.append(logprobs_of([prompt], **settings, **model, **each))
    errors = [abs(a - b) for a, b in zip(*found, strict=True)]
    assert 0 < sum(errors) / len(errors) < error
