"""NVIDIA ModelOpt checkpoints: NVFP4, MXFP4, MXFP8, FP8, integers of 4 bits (AWQ), or several of
these in one model.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.model_executor.layers.slice import CheckpointTensor, ParamTarget
from vllm.model_executor.layers.stored.stored_linear import on_host
from vllm.model_executor.layers.stored.stored_scales import without_zero_scales
from vllm.model_executor.quantization.checkpoint_format import CheckpointFormat, Names
from vllm.model_executor.quantization.float_groups import (
    GROUPS,
    FloatKind,
    FloatNames,
    described,
    float_linear,
)
from vllm.model_executor.quantization.formats.fp8 import (
    MODELOPT_FP8,
    ModelOptFp8,
    modelopt_fp8_linear,
)
from vllm.model_executor.quantization.interface import Quantization
from vllm.model_executor.quantization.row_tensors import (
    BYTES,
    RowsLinear,
    RowTensor,
    check_shape,
    finite,
    scale_tensor,
)
from vllm.model_executor.quantization.settings import (
    MAX_GROUP,
    Settings,
    choice,
    is_listed,
    names,
    read_modelopt_settings,
    wrong,
)
from vllm.ops.stored_weight import DenseValues, GroupedWeight, StoredWeight, nibbles_of

_FLOATS: dict[str, FloatKind] = {
    "NVFP4": "NVFP4",
    "W4A16_NVFP4": "NVFP4",
    "MXFP4": "MXFP4",
    "W4A16_MXFP4": "MXFP4",
    "MXFP8": "MXFP8",
}
"""Algorithms with scales of small groups, and the kinds of their elements."""
_AWQ = ("W4A16_AWQ", "W4A8_AWQ")
"""Algorithms with integers of 4 bits. The second rounds inputs, which is not done here."""
_MIXED = "MIXED_PRECISION"
_INPUT_FACTORS = "pre_quant_scale"
"""Tensor with a factor for each input of a layer, if AWQ could not move the factors into the layer
before it."""


@dataclass(frozen=True)
class _Storage:
    """Storage format of a layer."""

    algorithm: str
    group: int = 0
    """Inputs that share a scale, with integers of 4 bits."""
    has_input_factors: bool = False


def create_modelopt(settings: Settings) -> Quantization:
    """Create the format of `quant_method: modelopt` and `modelopt_fp4`.

    Raises:
        ConfigError: a setting is not supported.
    """
    settings = read_modelopt_settings(settings)
    algorithm = choice(settings, "quant_algo", (*MODELOPT_FP8, *_FLOATS, *_AWQ, _MIXED))
    return ModelOptFp8(settings) if algorithm in MODELOPT_FP8 else ModelOpt(settings)


class ModelOpt(CheckpointFormat[_Storage]):
    """A ModelOpt format with scales of small groups, or with a different algorithm per layer."""

    telling_tensor = "weight_scale"

    def __init__(self, settings: Settings) -> None:
        """Read the settings of config.json.

        Raises:
            ConfigError: a setting is not supported.
        """
        algorithm = choice(settings, "quant_algo", (*_FLOATS, *_AWQ, _MIXED))
        choice(settings, "kv_cache_quant_algo", ("FP8", None), None)
        self.ignored = names(settings, "ignore", "exclude_modules")
        self.says_factors = settings.get(_INPUT_FACTORS) is True
        self.of_layers: dict[str, _Storage] = {}
        self.of_all: _Storage | None = None
        if algorithm == _MIXED:
            self.of_layers = _read_layers(settings.get("quantized_layers"))
        else:
            self.of_all = _read_storage(algorithm, settings)

    def storage(self, names: Names) -> _Storage | None:
        found = self.of_all or next(
            (each for name, each in self.of_layers.items() if is_listed(names, [name])), None
        )
        if found is not None and found.algorithm in _AWQ:
            has_factors = self.says_factors
            if self.names.has_files:  # some layers have none, whatever the settings say
                has_factors = self.has_tensor(names, _INPUT_FACTORS)
            return replace(found, has_input_factors=has_factors)
        return found

    def method(self, name: str, storage: _Storage) -> LinearMethod:
        if storage.algorithm in MODELOPT_FP8:
            return modelopt_fp8_linear(name, storage.algorithm)
        if storage.algorithm in _AWQ:
            return SignedNibblesLinear(name, storage.group, storage.has_input_factors)
        return float_linear(name, _FLOATS[storage.algorithm], FloatNames())

    def described(self, storage: _Storage) -> str:
        kind = _FLOATS.get(storage.algorithm)
        if kind is not None:
            return described(kind, storage.algorithm == kind)
        return "W4A8_AWQ (read as W4A16)" if storage.algorithm == _AWQ[1] else storage.algorithm


class SignedNibblesLinear(RowsLinear):
    """A linear layer of integers from -8 to 7. A byte has two outputs of an input, the first one in
    the lower four bits.

    Args:
        name: name of the module.
        group: inputs that share a scale.
        has_input_factors: each input also has a factor. The weight is dequantized then.
    """

    def __init__(self, name: str, group: int, has_input_factors: bool) -> None:
        self.dtype = torch.get_default_dtype()
        tensors = [
            RowTensor(name="weight", dtypes=BYTES, dtype=torch.uint8, size=2),
            scale_tensor("weight_scale"),
        ]
        if has_input_factors:
            tensors.append(scale_tensor(_INPUT_FACTORS, of="inputs", check=finite))
        super().__init__(name, tensors, group)
        self.has_input_factors = has_input_factors
        self.unused_tensors = ("weight_scale_2", "input_scale")

    def arranged(
        self, target: ParamTarget, name: str, source: CheckpointTensor
    ) -> CheckpointTensor:
        num_out, num_in = self.features_of(target, source)
        if target.param_name == _INPUT_FACTORS:
            check_shape(name, source, [num_in])
            assert source.dtype is not None
            shape = torch.Size((num_out, num_in))
            return finite(name, source).made(shape, source.dtype, lambda x: x.expand(shape))
        if target.param_name != "weight":
            return super().arranged(target, name, source)
        check_shape(name, source, [-(-num_out // 2), num_in])
        return source.made(
            torch.Size((num_out, num_in // 2)),
            torch.uint8,
            lambda packed: _pairs_of_inputs(packed)[:num_out],
        )

    def stored_weight(self, layer: ParallelLinear) -> StoredWeight:
        packed, scales = on_host(layer, "weight"), on_host(layer, "weight_scale")
        if self.has_input_factors or layer.input_size % 8:
            signed = nibbles_of(packed).float() - _MIDDLE
            values = (signed.unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)
            if self.has_input_factors:
                values *= on_host(layer, _INPUT_FACTORS)
            return DenseValues(values=values.to(self.dtype))
        weight = GroupedWeight(
            words=packed.view(torch.int32).T.contiguous(),
            bits=4,
            scales=scales.T.contiguous(),
            zeros=torch.full(scales.T.shape, _MIDDLE, dtype=torch.int16),
        )
        return without_zero_scales(self.name, weight)


_MIDDLE = 8
"""Code of the integer 0."""


def _pairs_of_inputs(packed: Tensor) -> Tensor:
    """Convert pairs of outputs [N / 2, K] uint8 to pairs of inputs [N, K / 2], with 8 added to each
    integer.
    """
    codes = torch.stack((packed & 15, packed >> 4), dim=1).flatten(0, 1) ^ _MIDDLE
    return codes[:, 0::2] | codes[:, 1::2] << 4


def _read_layers(layers: Any) -> dict[str, _Storage]:
    """Return name -> storage of each layer."""
    if not isinstance(layers, dict) or not all(isinstance(v, dict) for v in layers.values()):
        raise wrong("quantized_layers", layers, "an object that maps layer names to settings")
    found = {}
    for name, settings in layers.items():
        within = f"quantized_layers.{name}."
        accepted = (*MODELOPT_FP8, *_FLOATS, *_AWQ)
        algorithm = choice(settings, "quant_algo", accepted, within=within)
        found[name] = _read_storage(algorithm, settings, within)
    return found


def _read_storage(algorithm: str, settings: Settings, within: str = "") -> _Storage:
    if algorithm in _FLOATS:
        _check_group(settings, _FLOATS[algorithm], within)
    if algorithm not in _AWQ:
        return _Storage(algorithm)
    choice(settings, "has_zero_point", (False, None), None, within)
    group = settings.get("group_size", 128)
    if type(group) is not int or not 0 < group <= MAX_GROUP:
        raise wrong(f"{within}group_size", group, f"a number from 1 to {MAX_GROUP}")
    return _Storage(algorithm, group)


def _check_group(settings: Settings, kind: FloatKind, within: str = "") -> None:
    size = GROUPS[kind]
    choice(settings, "group_size", (size, None), size, within)
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            choice(weights, "group_size", (size, None), size, "config_groups.*.weights.")
