"""NVIDIA ModelOpt checkpoints: NVFP4, MXFP4, MXFP8, FP8, or several of these in one model."""

from typing import Any

from vllm.model_executor.layers.linear import LinearMethod
from vllm.model_executor.quantization.checkpoint_format import CheckpointFormat, Names
from vllm.model_executor.quantization.float_groups import (
    GROUPS,
    FloatKind,
    FloatNames,
    described,
    float_linear,
)
from vllm.model_executor.quantization.fp8 import MODELOPT_FP8, ModelOptFp8, modelopt_fp8_linear
from vllm.model_executor.quantization.interface import Quantization
from vllm.model_executor.quantization.settings import (
    Settings,
    choice,
    is_listed,
    names,
    read_modelopt_settings,
    wrong,
)

_FLOATS: dict[str, FloatKind] = {
    "NVFP4": "NVFP4",
    "W4A16_NVFP4": "NVFP4",
    "MXFP4": "MXFP4",
    "W4A16_MXFP4": "MXFP4",
    "MXFP8": "MXFP8",
}
"""Algorithms with scales of small groups, and the kinds of their elements."""
_MIXED = "MIXED_PRECISION"


def create_modelopt(settings: Settings) -> Quantization:
    """Create the format of `quant_method: modelopt` and `modelopt_fp4`.

    Raises:
        ConfigError: a setting is not supported.
    """
    settings = read_modelopt_settings(settings)
    algorithm = choice(settings, "quant_algo", (*MODELOPT_FP8, *_FLOATS, _MIXED))
    return ModelOptFp8(settings) if algorithm in MODELOPT_FP8 else ModelOpt(settings)


class ModelOpt(CheckpointFormat[str]):
    """A ModelOpt format with scales of small groups, or with a different algorithm per layer.

    `Storage` is the name of the layer's algorithm.
    """

    def __init__(self, settings: Settings) -> None:
        """Read the settings of config.json.

        Raises:
            ConfigError: a setting is not supported.
        """
        self.algorithm = choice(settings, "quant_algo", (*_FLOATS, _MIXED))
        choice(settings, "kv_cache_quant_algo", ("FP8", None), None)
        self.ignored = names(settings, "ignore", "exclude_modules")
        self.of_layers: dict[str, str] = {}
        if self.algorithm == _MIXED:
            self.of_layers = _algorithms(settings.get("quantized_layers"))
        else:
            _check_group(settings, _FLOATS[self.algorithm])

    def storage_of(self, names: Names) -> str | None:
        if is_listed(names, self.ignored):
            return None
        if self.algorithm != _MIXED:
            return str(self.algorithm)
        return next((a for name, a in self.of_layers.items() if is_listed(names, [name])), None)

    def stores_head(self, names: Names) -> bool:
        # A checkpoint with a dense head may not list it in its settings, so look for its scale.
        return self.has_tensor(names, "weight_scale")

    def method(self, name: str, storage: str) -> LinearMethod:
        if storage in MODELOPT_FP8:
            return modelopt_fp8_linear(name, storage)
        return float_linear(name, _FLOATS[storage], FloatNames())

    def described(self, storage: str) -> str:
        kind = _FLOATS.get(storage)
        return storage if kind is None else described(kind, storage == kind)


def _algorithms(layers: Any) -> dict[str, str]:
    """Return name -> quantization algorithm of each layer."""
    if not isinstance(layers, dict) or not all(isinstance(v, dict) for v in layers.values()):
        raise wrong("quantized_layers", layers, "an object that maps layer names to settings")
    found = {}
    for name, settings in layers.items():
        within = f"quantized_layers.{name}."
        found[name] = choice(settings, "quant_algo", (*MODELOPT_FP8, *_FLOATS), within=within)
        if found[name] in _FLOATS:
            _check_group(settings, _FLOATS[found[name]], within)
    return found


def _check_group(settings: Settings, kind: FloatKind, within: str = "") -> None:
    size = GROUPS[kind]
    choice(settings, "group_size", (size, None), size, within)
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            choice(weights, "group_size", (size, None), size, "config_groups.*.weights.")
