"""Test an engine on `RealBridge`, over a package that has only the documented names.

The package is the stand-in, which records, and computes on a simulated card: so the test shows that
the engine makes only documented calls.
"""

from pathlib import Path

import pytest
import torch

from gaudi_sim.bridge import SimBridge
from tests.e2e.reference import TransformersReference, assert_all_greedy, random_prompts
from tests.platforms.test_habana_contract import BRIDGE_CALLS, DOCUMENTED, KERNEL_CALLS
from tests.tiny_models import make_tiny_model
from vllm import LLM, SamplingParams
from vllm.platforms import resolve_platform
from vllm.platforms.habana.real import RealBridge

MAX_TOKENS = 6
FEW_BUCKETS = {
    "VLLM_REGIONAL_COMPILATION": "0",
    "VLLM_PROMPT_BS_BUCKET_MAX": "1",
    "VLLM_PROMPT_SEQ_BUCKET_MIN": "64",
    "VLLM_PROMPT_SEQ_BUCKET_STEP": "64",
    "VLLM_PROMPT_SEQ_BUCKET_MAX": "64",
    "VLLM_DECODE_BS_BUCKET_MIN": "8",
    "VLLM_DECODE_BLOCK_BUCKET_MIN": "32",
    "VLLM_DECODE_BLOCK_BUCKET_STEP": "32",
}
FP8_PROMPTS = "torch.hpex.kernels.fp8_fused_sdpa"
KERNELS = {call[0] for _, calls in KERNEL_CALLS.values() for call in calls} - {FP8_PROMPTS}
"""Kernels that a model in float32 calls."""
FORMS = {call for _, calls in [*BRIDGE_CALLS.values(), *KERNEL_CALLS.values()] for call in calls}
"""Names with numbers of positional arguments and names of keywords."""
OPENING = ("torch.utils.internal.is_lazy", 0, ())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def num_compiled() -> int:
    """Return the number of graphs of torch.compile in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("is_lazy", "enforce_eager"),
    [
        pytest.param(True, False, id="HPU graphs"),
        pytest.param(True, True, id="lazy"),
        pytest.param(False, False, id="torch.compile", marks=pytest.mark.exhaustive),
        pytest.param(False, True, id="eager"),
    ],
)
def test_a_generation_makes_documented_calls_only(
    vendor_engine, environment, model, is_lazy, enforce_eager
):
    simulated = SimBridge("gaudi2", is_lazy=is_lazy)
    environment(**FEW_BUCKETS)
    num_cold_graphs = num_compiled()
    llm = LLM(
        model=str(model),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=enforce_eager,
        max_model_len=64,
        max_num_seqs=8,
        block_size=16,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        num_gpu_blocks_override=32,
    )
    assert isinstance(resolve_platform("hpu").bridge, RealBridge)
    warm, num_warm_graphs = simulated.counters(), num_compiled()
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    prompts = random_prompts(8, 40, vocab_size=4096)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert_all_greedy(outputs, prompts, params, TransformersReference(model))

    names = {name for name, _, _ in vendor_engine.calls}
    assert names <= DOCUMENTED.keys()
    assert set(vendor_engine.calls) <= FORMS | {OPENING}
    assert names >= KERNELS
    has_graphs = is_lazy and not enforce_eager
    assert ("torch.hpu.wrap_in_hpu_graph" in names) == has_graphs
    assert (simulated.counters().graph_replays > 0) == has_graphs
    assert simulated.counters().compilations == warm.compilations
    assert num_compiled() == num_warm_graphs
    assert (num_warm_graphs > num_cold_graphs) == (not is_lazy and not enforce_eager)
    assert simulated.counters().cpu_fallbacks == {}
