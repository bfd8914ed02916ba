"""Families that differ in their layers: same greedy tokens as `transformers`, on the CPU and on the
simulated Gaudi, with chunks and prefix hits. Log-probabilities are in test_every_family.
"""

from functools import cache

import pytest

from tests.e2e.reference import Reference, assert_same_tokens, generate, random_prompts
from tests.hpu import FEW_BUCKETS, simulated_hpu
from tests.tiny_models import MORE_FAMILIES
from vllm import LLM, SamplingParams
from vllm.attention.backends.prompt_masks import SlicedMask

MAX_TOKENS = 6
PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
SETTINGS = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 96,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "enable_chunked_prefill": True,
    "block_size": 16,
    "num_gpu_blocks_override": 70,
}
ON_A_CARD = (
    "falcon_rw",
    "cohere2",
    "gemma2",
    "gemma3",
    "gpt_bigcode",
    "phi3_short",
    "qwen2_moe",
    "gpt_oss",
    "llama4",
)
"""ALiBi; no rotations in some layers, and pairs of neighbours; a soft cap of scores, also with a
window; two rotations; learned positions and one key/value head; LongRoPE; experts. A latent cache
is in test_latent_attention."""


@pytest.fixture(scope="module")
def references(models):
    """What transformers makes of the prompts, computed once per family."""

    @cache
    def of(family: str) -> list[Reference]:
        prompts = random_prompts(10, 90 - MAX_TOKENS, vocab_size=4096)
        return generate(models(family), prompts, MAX_TOKENS)

    return of


def check(folder, want: list[Reference]) -> None:
    llm = LLM(model=str(folder), **SETTINGS)
    outputs = llm.generate([r.prompt for r in want], PARAMS, use_tqdm=False)
    for output, reference in zip(outputs, want, strict=True):
        assert_same_tokens(output.outputs[0].token_ids, reference)


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_a_family_gives_the_tokens_of_transformers(family, models, references):
    check(models(family), references(family))


@pytest.mark.parametrize("family", ON_A_CARD)
def test_a_family_gives_the_tokens_of_transformers_on_the_simulated_card(
    family, models, references
):
    with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **FEW_BUCKETS) as bridge:
        before = bridge.counters()
        check(models(family), references(family))
        assert bridge.counters().cpu_fallbacks == before.cpu_fallbacks


SLICED = {
    "VLLM_HPU_FSDPA_SLICE_ENABLED": 1,
    "VLLM_HPU_FSDPA_SLICE_SEQ_LEN_THLD": 32,
    "VLLM_HPU_FSDPA_SLICE_CHUNK_SIZE": 12,
    "VLLM_HPU_SIM_BRIDGE": "1.21",
}
"""Prompts of more than 32 tokens with their context attend in slices of 12 queries; the kernel of
this release knows no windows, so that prompts without context have masks too."""


@pytest.mark.parametrize(
    ("family", "mode"),
    [("falcon_rw", 1), ("falcon_rw", 0), ("gemma2", 1), ("gpt_oss", 1), ("llama4", 1)],
)
def test_prompts_in_slices_give_the_same_tokens(family, mode, models, references, monkeypatch):
    sliced, attend = [], SlicedMask.attend
    monkeypatch.setattr(
        SlicedMask, "attend", lambda self, *given: sliced.append(1) or attend(self, *given)
    )
    variables = {"PT_HPU_LAZY_MODE": mode, **FEW_BUCKETS, **SLICED}
    with simulated_hpu(has_profiling_run=False, **variables) as bridge:
        before = bridge.counters()
        check(models(family), references(family))
        assert bridge.counters().cpu_fallbacks == before.cpu_fallbacks
    assert sliced


BUILDS = {
    "gpt_oss": {"VLLM_HPU_SIM_BRIDGE": "1.19"},
    "gemma3": {"VLLM_HPU_SIM_ABSENT": "FusedSDPA,FusedRMSNorm,apply_rotary_pos_emb,metrics"},
    "cohere2": {"card": "gaudi3", "VLLM_FUSED_BLOCK_SOFTMAX": 1},
    "gemma2": {"card": "gaudi3"},
}
"""Simulated builds of the bridge: without what came late, without what no build should lack, and
with kernels for the softmax of blocks."""


@pytest.mark.parametrize("family", BUILDS)
def test_tokens_do_not_depend_on_the_kernels_that_a_build_has(family, models, references):
    variables = {"PT_HPU_LAZY_MODE": 1, **FEW_BUCKETS, **BUILDS[family]}
    with simulated_hpu(has_profiling_run=False, **variables) as bridge:
        before = bridge.counters()
        check(models(family), references(family))
        assert bridge.counters().cpu_fallbacks == before.cpu_fallbacks
