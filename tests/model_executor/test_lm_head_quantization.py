"""Test `--lm-head-quantization int8`: an output head that is dense in the checkpoint is rounded."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.model_executor.helpers import make_config
from tests.quantized_checkpoints import write
from vllm.assets import BUNDLED_MODEL
from vllm.distributed import TPGroup
from vllm.model_executor.layers.stored.stored_linear import StoredHead
from vllm.model_executor.loader import load_model
from vllm.model_executor.models.interface import CausalLM
from vllm.model_executor.quantization.formats.cpu_packed import CPUPacked
from vllm.ops.cpu.library import load_cpu_kernels
from vllm.ops.cpu.weights.linear import PackedWeight
from vllm.ops.cpu.weights.weight_format import WeightFormat

pytestmark = pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")

IDS = torch.tensor([0, 5, 4095, 77])


def load_as(folder: Path, asked: str, quantization: str | None = None) -> CausalLM:
    """Load a model in bfloat16, like the worker of the CPU."""
    config = make_config(folder, "bfloat16")
    model = replace(config.model, lm_head_quantization=asked, quantization=quantization)
    config = replace(config, model=model)
    found = load_model(config, TPGroup(), torch.device("cpu"), CPUPacked())
    assert isinstance(found, CausalLM)
    return found


def tied_copy(name: str, folder: Path) -> Path:
    """Return a quantized checkpoint of the bundled model whose head is tied to the embedding."""
    return write(name, folder, Path(BUNDLED_MODEL), skipped=("lm_head", "down_proj"))[0]


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("bundled", None), ("bundled", "fp8"), ("gptq-4", None), ("awq", None), ("fp8-block", None)],
)
@pytest.mark.parametrize("is_tied", [True, False])
@torch.inference_mode()
def test_a_dense_head_becomes_one_table_of_int8(name, quantization, is_tied, tiny_model, tmp_path):
    if name == "bundled":
        folder = Path(BUNDLED_MODEL) if is_tied else tiny_model("llama")
    else:
        folder = tied_copy(name, tmp_path) if is_tied else write(name, tmp_path)[0]
    dense = load_as(folder, "auto", quantization)
    table = dense.lm_head.method.packed.rows(torch.arange(4096), torch.bfloat16)
    want = PackedWeight.quantize(table, WeightFormat.INT8)

    model = load_as(folder, "int8", quantization)
    head, embedding = model.lm_head, model.embed
    hidden = torch.randn(3, table.shape[1], dtype=torch.bfloat16)
    assert torch.equal(head(hidden), want.linear(hidden))
    assert (head.method.packed is model.model.embed_tokens.method.packed) if is_tied else True
    source = want.rows(IDS, torch.bfloat16) if is_tied else dense.embed(IDS)
    assert torch.equal(embedding(IDS), source)
    # After packing, no dense copy of the weight is left.
    assert not list(head.parameters())
    assert bool(list(model.model.embed_tokens.parameters())) is not is_tied
    layers = [type(layer.self_attn.qkv_proj.method) for layer in model.layers]
    assert layers == [type(layer.self_attn.qkv_proj.method) for layer in dense.layers]


def test_a_head_that_the_checkpoint_quantizes_stays_as_it_is(tmp_path, caplog):
    folder, _ = write("gptq-4", tmp_path, stores_head=True)
    model = load_as(folder, "int8")
    assert isinstance(model.lm_head.method, StoredHead)
    assert "lm_head_quantization=int8 has no effect on lm_head" in caplog.text
