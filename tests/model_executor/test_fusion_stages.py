"""Test pipeline stages that run as programs: each continues with the result of the stage before,
and the last one has the bits of the whole model's modules.
"""

import pytest
import torch

from tests.model_executor.helpers import make_config
from tests.model_executor.test_fusion import (
    attention_layers,
    bind_caches,
    caches_of,
    run_fused,
    run_head,
)
from tests.model_executor.test_fusion_parallel import launches
from tests.tiny_models import (
    ALL_FAMILIES,
    ONE_STAGE,
    RARE_FAMILIES,
    SIBLINGS,
    VOCAB_SIZE,
    WITHOUT_PROGRAM,
)
from vllm.attention import LaunchContext, share_context
from vllm.distributed import Stage, TPGroup
from vllm.model_executor.fusion import fuse, fuse_head
from vllm.model_executor.loader import load_model
from vllm.model_executor.models.interface import CausalLM
from vllm.model_executor.quantization.formats.cpu_packed import CPUPacked
from vllm.ops.cpu.library import load_cpu_kernels

pytestmark = [
    pytest.mark.usefixtures("cpu_ops"),
    pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built"),
]

SPARED = (*RARE_FAMILIES, *SIBLINGS)
FAMILIES = [family for family in ALL_FAMILIES if family not in (*WITHOUT_PROGRAM, *ONE_STAGE)]


def load(folder, dtype: str, index: int = 0, count: int = 1) -> CausalLM:
    config = make_config(folder, dtype)
    stage = Stage.of(index, count, config.model.resolved_arch.num_layers)
    device = torch.device("cpu")
    model = load_model(config, TPGroup(), device, CPUPacked(), stage=stage)
    assert isinstance(model, CausalLM)
    for layer in attention_layers(model):
        bind_caches(layer, getattr(torch, dtype))
    return model


CASES = [
    *((family, 2, "bfloat16") for family in FAMILIES if family not in SPARED),
    *(
        pytest.param(family, 2, "bfloat16", marks=pytest.mark.exhaustive)
        for family in FAMILIES
        if family in SPARED
    ),
    # With three stages, the second stage is neither the first nor the last.
    ("llama", 3, "float32"),
]


@torch.inference_mode()
@pytest.mark.parametrize(("family", "count", "dtype"), CASES)
def test_programs_of_stages_have_the_bits_of_the_modules_of_one(tiny_model, family, count, dtype):
    folder = tiny_model(family)
    one = load(folder, dtype)
    stages = [load(folder, dtype, index, count) for index in range(count)]
    programs = [fuse(stage) for stage in stages]
    heads = [
        fuse_head(stage, program)
        for stage, program in zip(stages, programs, strict=True)
        if program
    ]
    assert [head and head.width for head in heads] == [*[None] * (count - 1), VOCAB_SIZE]
    assert [bool(p and p.given_width) for p in programs] == [False, *[True] * (count - 1)]
    for input_ids, positions, metadata in launches():
        got = input_ids
        for program in programs:
            got = run_fused(program, got, positions, metadata)
        with share_context(one).running(LaunchContext(metadata, positions)):
            want = one(input_ids, positions)
        assert torch.equal(got, want)
        assert torch.equal(run_head(heads[-1], got), one.compute_logits(want))
    written = [cache for stage in stages for a in attention_layers(stage) for cache in caches_of(a)]
    wanted = [cache for a in attention_layers(one) for cache in caches_of(a)]
    for cache, want in zip(written, wanted, strict=True):
        assert torch.equal(cache, want)


def test_hidden_states_that_do_not_fit_are_refused(tiny_model):
    program = fuse(load(tiny_model("llama"), "float32", 1, 2))
    _, positions, metadata = launches()[0]
    states = torch.zeros(positions.shape[1], 64)
    for wrong in (states[:, 1:].contiguous(), states.bfloat16(), states.mT.contiguous().mT):
        with pytest.raises(ValueError, match=r"inputs must be dense torch.float32 \[33, 64\]"):
            run_fused(program, wrong, positions, metadata)
