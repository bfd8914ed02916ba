"""Test that a weight format can be added as a `Quantization`, without a change to models or
loader.
"""

import dataclasses
import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from tests.model_executor.helpers import load, logits_of, prompt_of
from vllm.distributed import TPGroup
from vllm.errors import ConfigError
from vllm.model_executor.layers.embedding import (
    DenseTable,
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.layers.linear import LinearMethod, UnquantizedLinear
from vllm.model_executor.layers.slice import Slice
from vllm.model_executor.quantization import Quantization, register_quantization, registry


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


class MLPOnly(Quantization):
    def __init__(self, settings):
        assert settings["bits"] == 8

    def linear_method(self, name, layer):
        return RowScaledInt8() if ".mlp." in name else None


@pytest.fixture
def quantized(tiny_model, tmp_path):
    """Return the tiny Llama with int8 MLPs, and the same rounded weights as a dense checkpoint."""
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
    monkeypatch.setattr(registry, "FORMATS", {})
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


class OneScale(UnquantizedLinear):
    """Linear layers with int8 weights and one scale for each part of a packed layer. They are dense
    after loading.
    """

    def create_weights(self, layer):
        weight = torch.empty(layer.output_size, layer.input_size, dtype=torch.int8)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.scale = nn.Parameter(torch.empty(layer.output_size), requires_grad=False)
        layer.slices["weight"] = dict(layer.feature_slices)
        rows = Slice(0, 0, layer.output_size, layer.output_size)
        parts = layer.feature_slices.items()
        layer.slices["scale"] = {k: part if part.dim == 0 else rows for k, part in parts}

    def load(self, place, name, source, tp):
        if place.param_name == "scale":  # the checkpoint has one scale for all rows of this part
            place.param.narrow(0, place.slice.offset, place.slice.size).fill_(source.read(()))
        else:
            super().load(place, name, source, tp)

    def finish(self, layer):
        dense = layer.weight * layer.scale[:, None]
        layer.weight = nn.Parameter(dense, requires_grad=False)
        del layer.scale


class Doubled(DenseTable):
    """An output head whose values are halved in the checkpoint."""

    def finish(self, layer):
        layer.weight.mul_(2)


class WholeModel(Quantization):
    def __init__(self, settings):
        assert settings == {"quant_method": "toy_scaled"}

    def linear_method(self, name, layer):
        return OneScale()

    def embedding_method(self, name, layer):
        return Doubled() if name.endswith("lm_head") else None

    def finish_model(self, model):
        assert not any("scale" in name for name, _ in model.named_parameters())
        model.finished_by = self


@pytest.fixture
def scaled(tiny_model, tmp_path):
    """Return a tiny Llama with int8 layers and a halved head, and an equal dense checkpoint."""
    folders = [shutil.copytree(tiny_model("llama"), tmp_path / n) for n in ("int8", "dense")]
    int8, dense = {}, {}
    for name, tensor in load_file(folders[0] / "model.safetensors").items():
        int8[name] = dense[name] = tensor
        if name == "lm_head.weight":
            int8[name] = tensor / 2
        elif "_proj." in name:
            scale = tensor.abs().max() / 127
            rounded = (tensor / scale).round()
            int8[name] = rounded.to(torch.int8)
            int8[name.replace("weight", "scale")] = scale
            dense[name] = rounded * scale
    for folder, tensors in zip(folders, (int8, dense), strict=True):
        save_file(tensors, folder / "model.safetensors")
    config = json.loads((folders[0] / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "toy_scaled"}
    (folders[0] / "config.json").write_text(json.dumps(config))
    return folders


def test_a_format_may_load_finish_and_hold_embeddings_in_its_own_way(scaled, monkeypatch):
    monkeypatch.setattr(registry, "FORMATS", {})
    register_quantization("toy_scaled", WholeModel)
    int8, dense = scaled
    model, input_ids = load(int8), prompt_of(10)
    assert isinstance(model.finished_by, WholeModel)
    assert torch.equal(logits_of(model, input_ids), logits_of(load(dense), input_ids))


def test_a_format_that_is_only_made_while_loading_is_no_format_of_a_checkpoint(quantized):
    path = quantized[0] / "config.json"
    path.write_text(path.read_text().replace("toy_int8", "int8"))
    with pytest.raises(ConfigError, match="quantized with 'int8', which is not supported"):
        load(quantized[0])


def test_a_tied_head_and_its_embedding_change_their_method_together():
    embedding, head = (kind(10, 4, TPGroup()) for kind in (VocabParallelEmbedding, ParallelLMHead))
    head.tie(embedding)
    method = Doubled()
    head.use_method(method)
    assert embedding.method is head.method is method
    assert embedding.weight is head.weight
    assert [name for name, _ in nn.ModuleList([embedding, head]).named_parameters()] == ["0.weight"]


def test_an_unsupported_format_is_named(quantized):
    with pytest.raises(ConfigError, match=r"quantized with 'toy_int8', which is not supported"):
        load(quantized[0])
