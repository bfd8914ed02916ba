"""Write tests/reference_checkpoints: layers that the libraries of the formats have stored.

    pip install --no-deps compressed-tensors==0.20.0 autoawq==0.2.9 auto-gptq==0.7.1
    pip install --no-deps loguru frozendict
    python tools/make_reference_checkpoints.py tests/reference_checkpoints

in an environment of its own, with torch and transformers. Each file has a linear layer for each
scheme: its tensors as the library stores them, and `dequantized`, what the library makes of them,
in float32. Its metadata has the `quantization_config` of each.
"""

import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from torch import Tensor, nn

NUM_OUT, NUM_IN = 16, 64
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FLOAT8 = {"num_bits": 8, "type": "float"}
PER_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}

# Name -> arguments of the weight, and of the inputs.
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "w4a16": (INT4, None),
    "w4a16-asymmetric": (INT4 | {"symmetric": False}, None),
    "w4a16-channel": (INT4 | {"strategy": "channel", "group_size": None}, None),
    "w8a16-channel-asymmetric": (INT8 | {"symmetric": False}, None),
    "w8a8": (INT8, PER_TOKEN | {"type": "int"}),
    "fp8-tensor": (FLOAT8 | {"strategy": "tensor"}, PER_TOKEN | {"type": "float"}),
    "fp8-channel": (FLOAT8 | {"strategy": "channel"}, PER_TOKEN | {"type": "float"}),
    "fp8-block": (
        FLOAT8 | {"strategy": "block", "block_structure": [8, 32]},
        PER_TOKEN | {"type": "float"},
    ),
}


def parts_of(weight: Tensor, arguments: QuantizationArgs) -> Tensor:
    """Return a weight so that its last dimension has the elements that share a scale."""
    if arguments.strategy == "tensor":
        return weight.reshape(1, -1)
    if arguments.strategy == "channel":
        return weight[:, None]
    if arguments.strategy == "block":
        rows, columns = arguments.block_structure
        blocks = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        return blocks.transpose(1, 2).flatten(2)
    return weight.unflatten(1, (-1, arguments.group_size))


def stored(weights: dict[str, Any], inputs: dict[str, Any] | None) -> tuple[dict[str, Tensor], Any]:
    """Quantize a layer; return its tensors, with the dequantized weight, and its settings."""
    torch.manual_seed(0)
    layer = nn.Linear(NUM_IN, NUM_OUT, bias=False)
    layer.weight.data = torch.randn(NUM_OUT, NUM_IN) * 0.1
    model = nn.ModuleDict({"layer": layer})
    arguments = QuantizationArgs(**weights)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=arguments,
        input_activations=inputs and QuantizationArgs(**inputs),
    )
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}))
    parts = parts_of(layer.weight.data, arguments)
    scales, zeros = calculate_qparams(parts.amin(-1), parts.amax(-1), arguments)
    layer.weight_scale.data.copy_(scales.reshape(layer.weight_scale.shape))
    if hasattr(layer, "weight_zero_point"):
        layer.weight_zero_point.data.copy_(zeros.reshape(layer.weight_zero_point.shape))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    tensors = {
        name.removeprefix("layer."): tensor.clone().contiguous()
        for name, tensor in model.state_dict().items()
    }
    settings = json.loads(compressor.quantization_config.model_dump_json())
    compressor.decompress_model(model)
    return tensors | {"dequantized": layer.weight.data.float()}, settings


def without_init(*names: str) -> None:
    """Replace packages by empty ones, so that importing their modules does not run `__init__`.

    The imports of `__init__` are not needed to pack weights, and are not installed.
    """
    for name in names:
        package = types.ModuleType(name)
        root = importlib.util.find_spec(name.partition(".")[0])
        assert root is not None
        (folder,) = root.submodule_search_locations or ()
        package.__path__ = [str(Path(folder, *name.split(".")[1:]))]
        package.__spec__ = root
        sys.modules[name] = package


def rounded(
    num_out: int, bits: int, groups: Tensor, is_symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Make a weight whose elements have exact quantized values.

    Args:
        num_out: number of output features.
        bits: bits of a quantized element.
        groups: [in] group of each input feature.
        is_symmetric: whether all zero points are half of the range.

    Returns:
        The weight [out, in], and scales and zero points [out, number of groups].
    """
    torch.manual_seed(0)
    shape = num_out, int(groups.max()) + 1
    scales = (torch.rand(shape) * 0.01 + 0.001).half().float()
    zeros = torch.full(shape, 2 ** (bits - 1))
    if not is_symmetric:
        zeros = torch.randint(1, 2**bits, shape)
    numbers = torch.randint(0, 2**bits, (num_out, NUM_IN))
    return (numbers - zeros[:, groups]) * scales[:, groups], scales, zeros


def groups_of(size: int) -> Tensor:
    """Return the group of each input [in], for groups of `size` adjacent inputs."""
    return (torch.arange(NUM_IN) // size).int()


def by_autogptq() -> dict[str, tuple[dict[str, Tensor], Any]]:
    """Make layers with AutoGPTQ."""
    without_init("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear")
    library = importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda")
    made = {}
    num_out, size = 32, 32
    for bits, is_symmetric in ((2, False), (3, True), (4, False), (8, True)):
        groups = groups_of(size)
        if bits == 4:  # in random order, as with act-order
            groups = groups[torch.randperm(NUM_IN, generator=torch.Generator().manual_seed(1))]
        weight, scales, zeros = rounded(num_out, bits, groups, is_symmetric)
        linear = nn.Linear(NUM_IN, num_out, bias=False)
        linear.weight.data = weight
        layer = library.QuantLinear(
            *(bits, size, NUM_IN, num_out), bias=False, weight_dtype=torch.float32
        )
        layer.pack(linear, scales, zeros.float(), groups)
        dequantized = layer(torch.eye(NUM_IN)).T
        tensors = {name: values.clone() for name, values in layer.state_dict().items()}
        tensors["scales"] = tensors["scales"].half()
        settings = {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": size,
            "desc_act": bits == 4,
            "sym": is_symmetric,
        }
        made[f"{bits}-bits"] = tensors | {"dequantized": dequantized}, settings
    return made


def by_autoawq() -> dict[str, tuple[dict[str, Tensor], Any]]:
    """Make layers with AutoAWQ."""
    without_init("awq", "awq.modules", "awq.modules.linear", "awq.utils")
    gemm = importlib.import_module("awq.modules.linear.gemm")
    packing = importlib.import_module("awq.utils.packing_utils")
    num_out, size = 32, 32
    weight, scales, zeros = rounded(num_out, 4, groups_of(size), is_symmetric=False)
    linear = nn.Linear(NUM_IN, num_out, bias=False)
    linear.weight.data = weight
    layer = gemm.WQLinear_GEMM.from_linear(
        linear, 4, size, False, scales.T.contiguous(), zeros.T.contiguous()
    )
    tensors = {name: values.clone() for name, values in layer.state_dict().items()}
    stored = tensors["qweight"], tensors["qzeros"], tensors["scales"].float()
    dequantized = packing.dequantize_gemm(*stored, 4, size).T
    settings = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True}
    return {"4-bits": (tensors | {"dequantized": dequantized}, settings)}


def by_compressed_tensors() -> dict[str, tuple[dict[str, Tensor], Any]]:
    """Make layers with compressed-tensors."""
    return {name: stored(*arguments) for name, arguments in SCHEMES.items()}


def main(folder: str) -> None:
    """Write a checkpoint for each library."""
    for make in (by_compressed_tensors, by_autogptq, by_autoawq):
        tensors: dict[str, Tensor] = {}
        settings: dict[str, str] = {}
        for name, (made, config) in make().items():
            tensors |= {f"{name}.{key}": tensor.contiguous() for key, tensor in made.items()}
            settings[name] = json.dumps(config)
        save_file(tensors, Path(folder) / f"{make.__name__[3:]}.safetensors", settings)


if __name__ == "__main__":
    main(sys.argv[1])
