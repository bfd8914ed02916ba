"""Test sizes that no checkpoint has: they are refused in one line, before memory is allocated."""

import json
import resource
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model_executor.helpers import load
from tests.quantized_checkpoints import made_once
from tests.tiny_models import make_tiny_model
from vllm.errors import ConfigError, WeightLoadError

HUGE = 2**40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return made_once(tmp_path_factory.mktemp("quantized"))


@pytest.fixture(autouse=True)
def little_memory():
    """Limit the memory of this process to 4 GiB more than it has."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("value", [HUGE, 2**24, -1])
@pytest.mark.parametrize(
    "key",
    ["hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "num_key_value_heads"],
)
def test_sizes_of_config_json(checkpoint, tmp_path, key, value):
    folder = shutil.copytree(checkpoint("gptq-4")[0], tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    refused(folder, r"config.json|of another model|tensor .* has shape|must be a multiple of")


@pytest.mark.parametrize("value", [HUGE, 0, -7])
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("gptq-4", ("group_size",)),
        ("gptq-4", ("bits",)),
        ("awq", ("group_size",)),
        ("fp8-block", ("weight_block_size", 0)),
        ("ct-w4a16", ("config_groups", "group_0", "weights", "group_size")),
        ("ct-fp8-block", ("config_groups", "group_0", "weights", "block_structure", 1)),
    ],
)
def test_sizes_of_the_settings(checkpoint, tmp_path, name, path, value):
    folder = shutil.copytree(checkpoint(name)[0], tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    settings = config["quantization_config"]
    for key in path[:-1]:
        settings = settings[key]
    settings[path[-1]] = value
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, r"quantization_config\.")


@pytest.mark.parametrize("shape", [[HUGE, 0], [0, HUGE], [0], [HUGE], [2**62, 2**62]])
@pytest.mark.parametrize("name", ["gptq-4", "awq", "ct-w4a16", "fp8-block", "ct-w8a8"])
def test_shapes_of_tensors(checkpoint, tmp_path, name, shape):
    folder = shutil.copytree(checkpoint(name)[0], tmp_path / "changed")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for key in [key for key in tensors if "layers.1.mlp.gate_proj." in key]:
        if 0 in shape:
            save_file(tensors | {key: torch.empty(shape, dtype=tensors[key].dtype)}, file)
        else:
            save_file(tensors, file)
            with_shape(file, key, shape)
        refused(folder, "tensor .* has shape|damaged")


@pytest.mark.parametrize("family", ["granite_moe", "llama4", "gpt_oss"])
def test_numbers_of_experts(tmp_path, family):
    folder = make_tiny_model(family, tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    (key, *_) = (key for key, tensor in tensors.items() if tensor.dim() == 3)
    save_file(tensors | {key: torch.empty(HUGE, 0, 4)}, file)
    refused(folder, r"tensor model.* has shape .* the model needs \d experts in dimension 0")


@pytest.mark.parametrize("num_rows", [4, 191])
def test_rows_of_all_experts(tmp_path, num_rows):
    """The tensor of all experts has too few rows. The first number of rows equals the number of
    experts.
    """
    folder = make_tiny_model("dbrx", tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for kind in ("w1", "w2"):
        key = f"transformer.blocks.1.ffn.experts.mlp.{kind}"
        save_file(tensors | {key: tensors[key][:num_rows].contiguous()}, file)
        refused(
            folder,
            rf"experts.{kind} has shape .* the model needs 192 in dimension 0: 4 experts of 48",
        )


def with_shape(file, key, shape):
    """Change the shape of a tensor in the header of a file, which is then wrong."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header[key]["shape"] = shape
    changed = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(changed)) + changed + content[8 + length :])


def refused(folder, message):
    with pytest.raises((ConfigError, WeightLoadError), match=message) as error:
        load(folder)
    assert "\n" not in str(error.value)
