"""The simulated Gaudi in its four modes gives the tokens of `transformers`, and of the CPU.

Strict: nothing compiles, and the host waits for nothing, while a launch that was warmed up runs.
"""

from functools import cache
from pathlib import Path

import pytest

from tests.e2e.reference import Reference, assert_same_tokens, generate, random_prompts
from tests.hpu import FEW_BUCKETS, MODES, simulated_hpu
from tests.reach import scheduler_of
from tests.tiny_models import FAMILIES
from vllm import LLM, SamplingParams

MAX_MODEL_LEN = 160
MAX_TOKENS = 8
NUM_PROMPTS = 24

BUCKETS = FEW_BUCKETS | {
    "VLLM_PROMPT_BS_BUCKET_MAX": 2,
    "VLLM_PROMPT_SEQ_BUCKET_MIN": 64,
    "VLLM_PROMPT_SEQ_BUCKET_STEP": 64,
    "VLLM_PROMPT_SEQ_BUCKET_MAX": 64,
    "VLLM_DECODE_BS_BUCKET_MIN": 8,
}
"""Prompts beyond 64 tokens are launched in pieces."""

FEWER_TO_COMPILE = {
    "VLLM_PROMPT_BS_BUCKET_MAX": 1,
    "VLLM_DECODE_BLOCK_BUCKET_MIN": 64,
    "VLLM_DECODE_BLOCK_BUCKET_STEP": 64,
    "VLLM_REGIONAL_COMPILATION": False,
}
"""For torch.compile, which takes a second for each: the model as a whole, two decode buckets."""

LAYERS_APART = "layers compiled apart"
TWO_BUCKETS = "two buckets, preemption"
COMPILED_ONLY = (LAYERS_APART, TWO_BUCKETS)
PROMPT_SIZES = [f"VLLM_PROMPT_SEQ_BUCKET_{end}" for end in ("MIN", "STEP", "MAX")]

CHUNKS = {"enable_chunked_prefill": True, "max_num_batched_tokens": 48}
WHOLE_PROMPTS = {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024}
TINY_CACHE = {"num_gpu_blocks_override": 20}

SETTINGS = {
    "whole prompts": (WHOLE_PROMPTS, {}),
    "chunks, preemption": (CHUNKS | TINY_CACHE, {}),
    "contiguous, no prefix cache": (WHOLE_PROMPTS | {"enable_prefix_caching": False}, {}),
    "gathered, no prefix cache, preemption": (
        CHUNKS | {"num_gpu_blocks_override": 16, "enable_prefix_caching": False},
        {"VLLM_CONTIGUOUS_PA": False},
    ),
    "contiguous, prefix cache, preemption": (CHUNKS | TINY_CACHE, {"VLLM_CONTIGUOUS_PA": True}),
    "exponential": (CHUNKS, {"VLLM_EXPONENTIAL_BUCKETING": True}),
    "one block of 128": (WHOLE_PROMPTS | {"block_size": 128}, {}),
    "merged prompts": (CHUNKS, {"VLLM_MERGED_PREFILL": True}),
    "merged prompts, no prefix cache": (
        WHOLE_PROMPTS | {"enable_prefix_caching": False},
        {"VLLM_MERGED_PREFILL": True, "VLLM_PROMPT_SEQ_BUCKET_MAX": 256},
    ),
    "other softmax": (CHUNKS, {"VLLM_PA_SOFTMAX_IMPL": "wsum_head_amax"}),
    LAYERS_APART: (CHUNKS, {"VLLM_REGIONAL_COMPILATION": True}),
    "plain attention": (CHUNKS, {"VLLM_PROMPT_USE_FUSEDSDPA": False}),
    TWO_BUCKETS: (
        WHOLE_PROMPTS | {"enable_prefix_caching": False, "num_gpu_blocks_override": 14},
        dict.fromkeys(PROMPT_SIZES, 192),
    ),
}
"""Engine arguments and variables."""


SAME_LAYERS = ("llama3", "llama_linear", "llama_yarn", "bundled")
"""Llamas with other tables of rotations or other sizes: nothing that a mode could see."""

OTHER_KIND = "opt"
"""Layer norm, learned positions and biases; the other families are made of the llama's parts."""

EACH_LAUNCH = ("whole prompts", "merged prompts", "contiguous, prefix cache, preemption")
"""One for each kind of launch, for lazy and eager: a graph is captured from what lazy mode runs,
with the same buckets, and an operator with a recipe in lazy mode has one in eager mode too."""


def modes_of(family: str) -> list[str]:
    """Return all modes for llama and the family that differs most from it, the default for all."""
    return list(MODES) if family in ("llama", OTHER_KIND) else ["HPU graphs"]


@pytest.fixture(scope="module")
def references(models):
    """What transformers makes of the prompts, computed once per family."""

    @cache
    def of(family: str) -> list[Reference]:
        prompts = random_prompts(NUM_PROMPTS, MAX_MODEL_LEN - MAX_TOKENS - 4, vocab_size=4096)
        return generate(models(family), prompts, MAX_TOKENS)

    return of


def check(folder: Path, want: list[Reference], mode: str, setting: str, **overrides: int) -> None:
    """Run all prompts in a mode and a setting."""
    is_lazy, is_eager = MODES[mode]
    arguments, variables = SETTINGS[setting]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    fewer = FEWER_TO_COMPILE if mode == "torch.compile" else {}
    with simulated_hpu(
        has_profiling_run=False, PT_HPU_LAZY_MODE=is_lazy, **(BUCKETS | fewer | variables)
    ) as bridge:
        llm = LLM(
            model=str(folder),
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=is_eager,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=8,
            **({"block_size": 16, "num_gpu_blocks_override": 200} | arguments | overrides),
        )
        before = bridge.counters()
        outputs = llm.generate([r.prompt for r in want], params, use_tqdm=False)
        after = bridge.counters()
    for output, reference in zip(outputs, want, strict=True):
        assert_same_tokens(output.outputs[0].token_ids, reference)
    assert after.compilations == before.compilations
    assert after.cpu_fallbacks == before.cpu_fallbacks
    assert (mode == "HPU graphs") == (after.graph_replays > before.graph_replays)
    scheduler = scheduler_of(llm)
    assert (scheduler.num_preemptions > 0) == ("preemption" in setting)


@pytest.mark.parametrize(
    ("family", "mode"),
    [(family, mode) for family in [*FAMILIES, "bundled"] for mode in modes_of(family)],
)
def test_every_family_gives_the_same_tokens(family, mode, models, references):
    setting = TWO_BUCKETS if mode == "torch.compile" else "chunks, preemption"
    check(models(family), references(family), mode, setting)


def modes_and_settings() -> list[tuple[str, str]]:
    """What has not run with all families, and can make a difference."""
    settings = [name for name in SETTINGS if name not in ("chunks, preemption", *COMPILED_ONLY)]
    pairs = [("HPU graphs", setting) for setting in settings]
    return pairs + [(mode, setting) for setting in EACH_LAUNCH for mode in ("lazy", "eager")]


@pytest.mark.parametrize(("mode", "setting"), modes_and_settings())
def test_every_setting_gives_the_same_tokens(mode, setting, models, references):
    check(models("llama"), references("llama"), mode, setting)


@pytest.mark.parametrize(
    ("setting", "block_size"),
    [(LAYERS_APART, 64), ("merged prompts", 64), ("contiguous, prefix cache, preemption", 16)],
)
def test_compiled_settings_give_the_same_tokens(setting, block_size, models, references):
    """Each number of blocks that a prompt may have as its context is a launch to compile: of 16
    tokens 1, 2, 4, 8 and 10 blocks, of 64 tokens 1, 2 and 3."""
    model, want = models("mistral"), references("mistral")
    check(model, want, "torch.compile", setting, block_size=block_size)
