"""Test `vllm quantize` of every family: the written model loads, with weights close to the original
ones.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.model_executor.helpers import load, logits_of, prompt_of, weights_of
from tests.reach import replace_ops
from tests.tiny_models import (
    ALL_FAMILIES,
    LOAD_FLOAT32,
    ONE_STAGE,
    RARE_FAMILIES,
    make_tiny_model,
    sparing,
)
from vllm.assets import BUNDLED_MODEL
from vllm.config.families import FAMILIES
from vllm.entrypoints.cli.main import main
from vllm.entrypoints.quantize import run
from vllm.entrypoints.quantize.layerwise import Inputs, decoder_layers, linear_layers
from vllm.entrypoints.quantize.linear_modules import use_linear_modules
from vllm.entrypoints.quantize.rounding import Grid
from vllm.ops.native.operators import NativeOps
from vllm.transformers_utils.transformers_version import is_version_4

AWQ = {
    "llama": "llama",
    "granite": "granite",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "mixtral": "mixtral",
    "qwen2_moe": "qwen2_moe",
    "qwen3_moe": "qwen3_moe",
    "granite_moe": "granitemoe",
    "hunyuan_dense": "hunyuan_v1_dense",
    **{
        name: name
        for name in (
            *("smollm3", "ministral3", "exaone4", "ernie4_5", "seed_oss", "helium", "cwm"),
            "vaultgemma",
        )
    },
}
"""Family -> its `model_type`."""
MOST = {"fp8": 0.04, "int8": 0.02, "gptq": 0.25}
"""By which a weight may change, as a part of it."""
ALWAYS = {
    "fp8": ("gpt2", "stablelm_head_norms", "llama4", "granite_hybrid"),
    "gptq": ("qwen3_moe", "gpt2", "granite_hybrid"),
}
"""Cases that are not left to the exhaustive run."""


def test_all_families_of_awq_are_tried():
    assert set(AWQ.values()) == {name for name, family in FAMILIES.items() if family.awq_pairs}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family) / "made"
            made[family] = make_tiny_model(family, folder)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(BUNDLED_MODEL / name, folder)
            (folder / "texts.txt").write_text((BUNDLED_MODEL / "README.md").read_text())
        return made[family]

    return get


def test_layers_that_read_earlier_ones_are_not_calibrated(dense, tmp_path, capsys):
    with pytest.raises((AssertionError, SystemExit)):
        quantized(dense("gemma4"), tmp_path / "out", "gptq")
    assert "it cannot quantize Gemma4ForCausalLM, whose layers" in capsys.readouterr().err


def quantized(folder, out, method):
    texts = ("--dataset", str(folder / "texts.txt"), "--num-samples", "2", "--sample-tokens", "32")
    where = ("--model", str(folder), "--out", str(out), "--group-size", "16")
    assert main(["quantize", "--method", method, *where, *texts]) == 0
    return out


@pytest.mark.parametrize(
    ("method", "family"),
    [
        pytest.param(
            *(method, family),
            marks=[] if family in ALWAYS.get(method, ()) else pytest.mark.exhaustive,
        )
        for method in MOST
        for family in ALL_FAMILIES
        if method != "gptq" or family not in ONE_STAGE
    ],
)
def test_weights_are_near_those_before(dense, tmp_path, monkeypatch, method, family):
    if method == "gptq" and family.startswith(("granite_", "dbrx", "longcat")) and is_version_4():
        pytest.skip(f"experts of {family} are no linear layers in this transformers")
    replace_ops(monkeypatch, NativeOps())
    folder = dense(family)
    out = quantized(folder, tmp_path / "out", method)
    got, want = (weights_of(load(each)) for each in (out, folder))
    num_changed = 0
    for path, weight in want.items():
        error = (got[path] - weight).norm() / weight.norm()
        assert error < MOST[method], path
        num_changed += bool(error)
    assert num_changed >= 4
    routers = [n for n in load_file(out / "model.safetensors") if ".gate." in n or "router" in n]
    assert not any(name.endswith(("weight_scale", "qweight")) for name in routers)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f == "mixtral" else pytest.mark.exhaustive) for f in AWQ]
)
def test_awq_is_loaded(dense, tmp_path, family):
    folder = dense(family)
    out = quantized(folder, tmp_path / "out", "awq")
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "awq"
    got, want = (logits_of(load(each), prompt_of(20)) for each in (out, folder))
    assert 0 < (got - want).norm() < 0.75 * want.norm()


@pytest.mark.parametrize("family", sparing(AWQ, RARE_FAMILIES))
@torch.no_grad()
def test_scaled_weights_mean_the_same_model(dense, family):
    """Before weights are rounded, the layer that makes the inputs is divided by the factor that
    multiplies the weights.
    """
    folder = dense(family)
    model = AutoModelForCausalLM.from_pretrained(folder, **LOAD_FLOAT32).eval()
    ids = prompt_of(20)[None]
    want = model(ids).logits
    use_linear_modules(model)
    torch.testing.assert_close(model(ids).logits, want, rtol=0, atol=1e-4)
    num_changed = 0
    for layer in decoder_layers(model)[1]:
        linears = dict(linear_layers(layer))
        inputs = {}
        for name, linear in linears.items():
            x = torch.randn(4, linear.in_features) * (1 + torch.arange(linear.in_features))
            inputs[name] = Inputs(x.T @ x, [x])
        quantized_names = {name for name in linears if "gate." not in f"{name}."[-6:]}
        before = {name: linear.weight.clone() for name, linear in linears.items()}
        grid = Grid(bits=4, group_size=16, is_symmetric=False)
        run.scale_inputs(FAMILIES[AWQ[family]], layer, inputs, grid, quantized_names)
        num_changed += sum(not torch.equal(before[n], linears[n].weight) for n in linears)
    assert num_changed >= 4
    torch.testing.assert_close(model(ids).logits, want, rtol=0, atol=2e-3)
