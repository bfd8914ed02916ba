"""Quantization formats by their names, in `--quantization` and in checkpoints (`quant_method`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.config import ModelConfig
from vllm.config.quant_method import quant_method
from vllm.errors import ConfigError
from vllm.model_executor.quantization.interface import Quantization
from vllm.model_executor.quantization.settings import NOT_MARLIN
from vllm.utils.imports import load_class

CreateQuantization = Callable[[Any], Quantization]
"""Settings -> the format. They are the `quantization_config` of a checkpoint; None: the checkpoint
is not quantized, and the format was asked for with `--quantization`. Of inc: an `IncConfig`."""


@dataclass(frozen=True)
class Format:
    """A row of the table."""

    create: str | CreateQuantization
    """A string is "module:Class", which is imported when a model needs it."""
    is_stored: bool = True
    """Whether checkpoints have it; else it is only made of dense ones. Which formats a device can
    make is in `Platform.quantizations`."""


_PACKAGE = "vllm.model_executor.quantization"

_formats: dict[str, Format] = {
    "int8": Format(f"{_PACKAGE}.cpu_packed:CPUInt8", is_stored=False),
    "int4": Format(f"{_PACKAGE}.cpu_packed:CPUInt4", is_stored=False),
    "inc": Format(f"{_PACKAGE}.inc:create_inc", is_stored=False),
    "mxfp4": Format(f"{_PACKAGE}.mxfp4:MXFP4"),
    "fp8": Format(f"{_PACKAGE}.fp8:Fp8"),
    "fbgemm_fp8": Format(f"{_PACKAGE}.fp8:Fp8"),
    "modelopt": Format(f"{_PACKAGE}.fp8:ModelOptFp8"),
    "gptq": Format(f"{_PACKAGE}.gptq:GPTQ"),
    "awq": Format(f"{_PACKAGE}.awq:AWQ"),
    "auto-round": Format(f"{_PACKAGE}.auto_round:create_auto_round"),
    "intel/auto-round": Format(f"{_PACKAGE}.auto_round:create_auto_round"),
    "compressed-tensors": Format(f"{_PACKAGE}.compressed_tensors:CompressedTensors"),
}

_INSTEAD = {
    "bitsandbytes": "load the unquantized checkpoint with --quantization int4 or int8",
    "hqq": "load the unquantized checkpoint with --quantization int4 or int8",
    "mlx": "load the unquantized checkpoint with --quantization int4 or int8",
    "exl2": "use a GPTQ or AWQ checkpoint of the model, or the unquantized one with "
    "--quantization int4",
    "exl3": "use a GPTQ or AWQ checkpoint of the model, or the unquantized one with "
    "--quantization int4",
    "inc": "use the unquantized checkpoint with --quantization inc and the QUANT_CONFIG that "
    "`vllm calibrate` writes",
    "quark": "use a checkpoint of compressed-tensors or GPTQ, or the unquantized one with "
    "--quantization fp8 or int8",
    "torchao": "load the unquantized checkpoint with --quantization int4, int8 or fp8",
    "marlin": f"use {NOT_MARLIN}",
}
"""What to do about formats that are not supported on purpose."""


def register_quantization(name: str, create: str | CreateQuantization) -> None:
    """Add a format of checkpoints."""
    _formats[name] = Format(create)


def quantization_of(model: ModelConfig) -> Quantization | None:
    """The format of a checkpoint, or else the one that was asked for; None: dense weights.

    Raises:
        ConfigError: the format is not supported, or not with these settings.
    """
    settings = model.resolved_arch.hf_config.get("quantization_config") or None
    name = quant_method(model.resolved_arch) or model.quantization
    if name is None:
        return None
    found = _formats.get(name)
    if found is None or (settings and not found.is_stored):
        names = sorted(name for name, row in _formats.items() if row.is_stored)
        supported = (
            f"use a checkpoint of a supported format ({', '.join(names)}), or the unquantized one "
            f"with --quantization int4, int8 or fp8"
        )
        raise ConfigError(
            f"the checkpoint is quantized with {name!r}, which is not supported; "
            f"{_INSTEAD.get(name, supported)}"
        )
    if settings and model.inc is not None:
        on_stored = load_class(f"{_PACKAGE}.inc_stored:IncOnStored")
        combined: Quantization = on_stored(_create("inc", model.inc), _create(name, settings))
        return combined
    return _create(name, settings or model.inc)


def head_quantization_of(model: ModelConfig) -> Quantization | None:
    """The format of output heads that no other format takes; None: they are dense."""
    if model.lm_head_quantization == "auto":
        return None
    create: Callable[[], Quantization] = load_class(f"{_PACKAGE}.cpu_packed:CPUInt8Head")
    return create()


def _create(name: str, settings: Any) -> Quantization:
    create = _formats[name].create
    if isinstance(create, str):
        create = load_class(create)
    quantization: Quantization = create(settings)
    return quantization
