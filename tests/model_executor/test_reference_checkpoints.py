"""Test layers that were stored by the libraries of the formats: the weights equal theirs, bit for
bit.

The files were made by tools/make_reference_checkpoints.py.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.model_executor.test_quantized_checkpoints import weight_of
from tests.reach import replace_ops
from vllm.distributed import TPGroup
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.layers.slice import CheckpointTensor, ParamTarget
from vllm.model_executor.quantization.formats.awq import AWQ
from vllm.model_executor.quantization.formats.compressed_tensors import CompressedTensors
from vllm.model_executor.quantization.formats.gptq import GPTQ
from vllm.ops.cpu.library import load_cpu_kernels
from vllm.ops.cpu.operators import CPUOps
from vllm.ops.native.operators import NativeOps

FOLDER = Path(__file__).parents[1] / "reference_checkpoints"
FORMATS = {"autogptq": GPTQ, "autoawq": AWQ, "compressed_tensors": CompressedTensors}
SCHEMES = [
    (library, scheme)
    for library in FORMATS
    for scheme in sorted(safe_open(FOLDER / f"{library}.safetensors", "pt").metadata())
]


@pytest.mark.parametrize("ops", [NativeOps, CPUOps])
@pytest.mark.parametrize(("library", "scheme"), SCHEMES)
def test_weights_are_those_of_the_library(monkeypatch, library, scheme, ops):
    if ops is CPUOps and load_cpu_kernels() is None:
        pytest.skip("the kernels are not built")
    replace_ops(monkeypatch, ops())
    with safe_open(FOLDER / f"{library}.safetensors", "pt") as file:
        settings = json.loads(file.metadata()[scheme])
        tensors = {
            key.removeprefix(f"{scheme}."): file.get_tensor(key)
            for key in file.keys()  # noqa: SIM118
            if key.startswith(f"{scheme}.")
        }
    want = tensors.pop("dequantized")
    num_out, num_in = want.shape
    layer = ColumnParallelLinear(num_in, {"": num_out}, TPGroup())
    layer.use_method(FORMATS[library](settings).linear_method("layer", layer))
    assert set(tensors) == {name for name, _ in layer.named_parameters()}
    for name, tensor in tensors.items():
        place = ParamTarget(layer, name, layer.slices[name][""])
        source = CheckpointTensor(tensor.shape, tensor.__getitem__, dtype=tensor.dtype)
        layer.load(place, name, source, TPGroup())
    layer.finish()
    assert torch.equal(weight_of(layer), want)
