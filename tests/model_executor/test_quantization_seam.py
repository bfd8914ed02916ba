"""A weight format enters as a `LinearMethod`, without a change to models or loader."""

import dataclasses
import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from tests.model_executor.helpers import load, logits_of, prompt_of
from vllm.errors import ConfigError
from vllm.model_executor.layers.linear import LinearMethod
from vllm.model_executor.quantization import register_quantization, registry


class RowScaledInt8(LinearMethod):
    """int8 weights stored transposed, [in, out], with one scale per output."""

    def create_weights(self, layer):
        weight = torch.empty(layer.input_size, layer.output_size, dtype=torch.int8)
        layer.qweight = nn.Parameter(weight, requires_grad=False)
        layer.scales = nn.Parameter(torch.empty(layer.output_size), requires_grad=False)
        parts = layer.feature_slices
        layer.slices["qweight"] = {
            name: dataclasses.replace(part, dim=1 - part.dim) for name, part in parts.items()
        }
        if all(part.dim == 0 for part in parts.values()):
            layer.slices["scales"] = dict(parts)

    def apply(self, layer, x, bias):
        return F.linear(x, (layer.qweight.to(x.dtype) * layer.scales).T, bias)


class MLPOnly:
    def __init__(self, settings):
        assert settings["bits"] == 8

    def linear_method(self, name, layer):
        return RowScaledInt8() if ".mlp." in name else None


@pytest.fixture
def quantized(tiny_model, tmp_path):
    """The tiny Llama with int8 MLPs, and the same rounded weights as a dense checkpoint."""
    folders = [shutil.copytree(tiny_model("llama"), tmp_path / n) for n in ("int8", "dense")]
    int8, dense = {}, {}
    for name, tensor in load_file(folders[0] / "model.safetensors").items():
        if ".mlp." not in name:
            int8[name] = dense[name] = tensor
            continue
        scales = tensor.abs().amax(1) / 127
        rounded = (tensor / scales[:, None]).round()
        stem = name.removesuffix("weight")
        int8[f"{stem}qweight"] = rounded.T.to(torch.int8).contiguous()
        int8[f"{stem}scales"] = scales
        dense[name] = rounded * scales[:, None]
    for folder, tensors in zip(folders, (int8, dense), strict=True):
        save_file(tensors, folder / "model.safetensors")
    config = json.loads((folders[0] / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "toy_int8", "bits": 8}
    (folders[0] / "config.json").write_text(json.dumps(config))
    return folders


def test_a_registered_format_is_loaded_and_applied(quantized, monkeypatch):
    monkeypatch.setattr(registry, "_formats", {})
    register_quantization("toy_int8", MLPOnly)
    int8, dense = quantized
    model = load(int8)
    gate_up = model.model.layers[0].mlp.gate_up_proj
    assert "weight" not in dict(gate_up.named_parameters())
    assert gate_up.qweight.dtype is torch.int8
    input_ids = prompt_of(10)
    torch.testing.assert_close(
        logits_of(model, input_ids), logits_of(load(dense), input_ids), atol=2e-5, rtol=0
    )


def test_an_unsupported_format_is_named(quantized):
    with pytest.raises(ConfigError, match=r"quantized with 'toy_int8', which is not supported"):
        load(quantized[0])
