"""Test quantized layers in the program of a model: of every format, split over ranks, and rounded
from the dense layers of every family.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.model_executor.helpers import load, logits_of, make_config, prompt_of, weights_of
from tests.model_executor.test_fusion import (
    BLOCK_SIZE,
    MIXED,
    NUM_BLOCKS,
    assert_same_bits,
    attention_layers,
)
from tests.quantized_checkpoints import FORMATS, each_format, made_once, write
from tests.reach import replace_ops
from tests.tiny_models import ALL_FAMILIES, make_tiny_model
from vllm.distributed import TPGroup
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.linear import ParallelLinear
from vllm.model_executor.layers.stored.stored_experts import StoredExperts
from vllm.model_executor.loader import load_model
from vllm.model_executor.quantization.formats.cpu_packed import CPUPacked
from vllm.ops.cpu.library import load_cpu_kernels
from vllm.ops.cpu.operators import CPUOps
from vllm.ops.native.operators import NativeOps

needs_kernels = pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")
MIXED_LAYERS = ("layers.0.mlp", "layers.1.self_attn")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return made_once(tmp_path_factory.mktemp("quantized"))


def load_for_cpu(folder, dtype="bfloat16", **model):
    """Load a model like the worker of the CPU, which also packs dense layers."""
    config = make_config(folder, dtype)
    config = replace(config, model=replace(config.model, **model))
    return load_model(config, TPGroup(), torch.device("cpu"), CPUPacked())


def assert_program_has_the_bits_of_modules(model):
    for layer in attention_layers(model):
        shape = (NUM_BLOCKS, BLOCK_SIZE, layer.num_kv_heads, layer.head_size)
        zeros = (torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2))
        layer.bind_kv_cache(*zeros)
    assert_same_bits(model, MIXED)


@needs_kernels
@pytest.mark.parametrize("name", each_format(is_costly=True))
def test_a_program_has_the_bits_of_the_modules(checkpoint, monkeypatch, name):
    replace_ops(monkeypatch, CPUOps())
    assert_program_has_the_bits_of_modules(load_for_cpu(checkpoint(name)[0]))


@needs_kernels
@pytest.mark.parametrize("name", ["ct-w8a8", "ct-w4a16", "fp8-static", "awq", "gptq-8"])
def test_some_layers_may_be_quantized_and_others_not(tmp_path, monkeypatch, name):
    replace_ops(monkeypatch, CPUOps())
    folder, dense = write(name, tmp_path, skipped=MIXED_LAYERS)
    model = load_for_cpu(folder)
    assert_program_has_the_bits_of_modules(model)
    weights = {type(m.method).__name__ for m in model.modules() if isinstance(m, ParallelLinear)}
    assert len(weights) == 2
    got, want = (logits_of(load(each), prompt_of(20)) for each in (folder, dense))
    assert (got - want).norm() < 0.2 * want.norm()


LAST_OF_TWO = {"rank": 1, "size": 2}
"""Only a rank other than 0 shows errors in its first index, because rank 0 begins at 0."""


def assert_same_weights(name, folders, tp):
    """Check that the weights of two checkpoints agree, and return the first model."""
    models = [load(folder, tp) for folder in folders]
    got, want = map(weights_of, models)
    assert any(".mlp." in path for path in want)
    for path, weight in want.items():
        FORMATS[name].check(got[path], weight, path)
    return models[0]


@pytest.mark.parametrize("name", each_format("gptq-3"))
def test_a_rank_has_its_part_of_every_format(checkpoint, monkeypatch, name):
    replace_ops(monkeypatch, NativeOps())
    assert_same_weights(name, checkpoint(name), TPGroup(**LAST_OF_TWO))


@pytest.mark.parametrize(
    "is_whole",
    # Exhaustive: test_fusion_parallel.py tests whole experts in every run.
    [False, pytest.param(True, marks=pytest.mark.exhaustive)],
    ids=["split", "whole"],
)
@pytest.mark.parametrize("name", each_format("fp8-channel-ignored", is_costly=True))
def test_a_rank_has_its_part_of_quantized_experts(
    tiny_experts, tmp_path, monkeypatch, name, is_whole
):
    """A rank has a part of each expert, or all of some experts."""
    replace_ops(monkeypatch, NativeOps())
    folders = write(name, tmp_path, tiny_experts)
    model = assert_same_weights(name, folders, TPGroup(**LAST_OF_TWO, has_whole_experts=is_whole))
    experts = [m for m in model.modules() if isinstance(m, Experts)]
    assert experts and all(isinstance(layer.method, StoredExperts) for layer in experts)


@pytest.fixture(scope="module")
def tiny_experts(tmp_path_factory):
    sizes = {"moe_intermediate_size": 64, "intermediate_size": 192}
    return make_tiny_model("qwen3_moe", tmp_path_factory.mktemp("experts") / "made", **sizes)


@needs_kernels
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize(("name", "most"), [("int8", 0.4), ("int4", 1.0), ("fp8", 0.5)])
def test_dense_layers_of_every_family_are_quantized_while_they_are_loaded(
    tmp_path, monkeypatch, family, name, most
):
    replace_ops(monkeypatch, CPUOps())
    folder = make_tiny_model(family, tmp_path)
    model, ids = load_for_cpu(folder, "float32", quantization=name), prompt_of(20)
    got, want = (logits_of(each, ids) for each in (model, load(folder)))
    assert 1e-4 * want.norm() < (got - want).norm() < most * want.norm()
    dense = [p for p, m in model.named_modules() if isinstance(m, ParallelLinear) and is_dense(m)]
    assert not dense


def is_dense(layer: nn.Module) -> bool:
    return not layer.keeps_precision and hasattr(layer, "weight") and layer.weight.numel() > 4096
