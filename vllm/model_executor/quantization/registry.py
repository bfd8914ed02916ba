"""Quantization formats by name, as in `--quantization` and in checkpoints (`quant_method`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.config import ModelConfig
from vllm.config.quantization.quant_method import quant_method, usual_name
from vllm.errors import ConfigError
from vllm.model_executor.quantization.interface import Quantization
from vllm.model_executor.quantization.settings import NOT_MARLIN
from vllm.utils.imports import load_class

CreateQuantization = Callable[[Any], Quantization]
"""Settings -> the format. They are the `quantization_config` of a checkpoint; None: the checkpoint
is not quantized, and the format was asked for with `--quantization`. Of inc: an `IncConfig`."""


@dataclass(frozen=True)
class Format:
    """One entry of the table of formats."""

    create: str | CreateQuantization | None = None
    """Creates the format of a checkpoint; None: no checkpoints have it. A string is "module:Class",
    which is imported when a model needs it."""
    rounds: str | None = None
    """Function that makes the format of dense checkpoints, if a device has no way of its own.
    `Platform.quantizations` names the formats that a device can make."""
    rounds_on: Mapping[str, str] = field(default_factory=dict)
    """Type of a device -> how it makes them of dense checkpoints."""

    @property
    def is_stored(self) -> bool:
        """Whether checkpoints can be stored in this format."""
        return self.create is not None


_PACKAGE = "vllm.model_executor.quantization.formats"

FORMATS: dict[str, Format] = {
    "int8": Format(
        rounds=f"{_PACKAGE}.rounded:create_int8",
        rounds_on={"cpu": f"{_PACKAGE}.cpu_packed:CPUInt8"},
    ),
    "int4": Format(
        rounds=f"{_PACKAGE}.rounded:create_int4",
        rounds_on={"cpu": f"{_PACKAGE}.cpu_packed:CPUInt4"},
    ),
    "inc": Format(rounds="vllm.model_executor.quantization.inc.inc:create_inc"),
    "mlx": Format(f"{_PACKAGE}.mlx:MLX"),
    "mxfp4": Format(f"{_PACKAGE}.mxfp4:MXFP4"),
    "fp8": Format(f"{_PACKAGE}.fp8:Fp8", rounds=f"{_PACKAGE}.rounded:create_fp8"),
    "fbgemm_fp8": Format(f"{_PACKAGE}.fp8:Fp8"),
    "modelopt": Format(f"{_PACKAGE}.modelopt:create_modelopt"),
    "modelopt_fp4": Format(f"{_PACKAGE}.modelopt:create_modelopt"),
    "gptq": Format(f"{_PACKAGE}.gptq:GPTQ"),
    "awq": Format(f"{_PACKAGE}.awq:AWQ"),
    "auto-round": Format(f"{_PACKAGE}.auto_round:create_auto_round"),
    "intel/auto-round": Format(f"{_PACKAGE}.auto_round:create_auto_round"),
    "bitsandbytes": Format(
        f"{_PACKAGE}.bitsandbytes:BitsAndBytes",
        rounds=f"{_PACKAGE}.rounded:create_nf4",
        # Gaudi kernels do not support the table format.
        rounds_on={"hpu": f"{_PACKAGE}.rounded:create_int4"},
    ),
    "torchao": Format(f"{_PACKAGE}.torchao:TorchAO"),
    "hqq": Format(f"{_PACKAGE}.hqq:HQQ"),
    "quark": Format(f"{_PACKAGE}.quark:Quark"),
    "compressed-tensors": Format(f"{_PACKAGE}.compressed_tensors:CompressedTensors"),
}

_FEW_BITS = (
    "use a GPTQ or AWQ checkpoint of the model, or the unquantized one with --quantization int4"
)
_8_BITS = (
    "use an FP8 or compressed-tensors checkpoint of the model, or the unquantized one with "
    "--quantization int8"
)
_INSTEAD = {
    **dict.fromkeys(
        (
            *("exl2", "exl3", "aqlm", "vptq", "spqr", "higgs", "quip", "quip_sharp", "qtip"),
            *("squeezellm", "owq", "fp_quant", "four_over_six", "sinq", "bitnet"),
        ),
        _FEW_BITS,
    ),
    **dict.fromkeys(
        ("eetq", "quanto", "tpu_int8", "experts_int8", "deepspeedfp", "neuron_quant"), _8_BITS
    ),
    "gguf": "give the GGUF file as the model",
    "inc": "use the unquantized checkpoint with --quantization inc and the QUANT_CONFIG that "
    "`vllm calibrate` writes",
    **dict.fromkeys(("marlin", "gptq_marlin_24"), f"use {NOT_MARLIN}"),
}
"""Advice about formats that are not supported on purpose."""


def register_quantization(name: str, create: str | CreateQuantization) -> None:
    """Add a format for checkpoints with this `quant_method`."""
    FORMATS[usual_name(name)] = Format(create)


def quantization_of(model: ModelConfig, device_type: str = "cpu") -> Quantization | None:
    """Return the format of a checkpoint, else the requested format; None: dense weights.

    Args:
        model: config of the model, with its settings of quantization.
        device_type: type of the device that the weights are for.

    Raises:
        ConfigError: the format is not supported, or not with these settings.
    """
    settings = model.resolved_arch.hf_config.get("quantization_config") or None
    name = quant_method(model.resolved_arch) or model.quantization
    if name is None:
        return None
    found = FORMATS.get(name)
    if found is None or (settings and not found.is_stored):
        names = sorted(name for name, row in FORMATS.items() if row.is_stored)
        supported = (
            f"use a checkpoint of a supported format ({', '.join(names)}), or the unquantized one "
            f"with --quantization int4, int8 or fp8"
        )
        raise ConfigError(
            f"the checkpoint is quantized with {name!r}, which is not supported; "
            f"{_INSTEAD.get(name, supported)}"
        )
    if not settings:
        rounds = found.rounds_on.get(device_type) or found.rounds or found.create
        assert rounds is not None
        return _create(rounds, model.inc)
    assert found.create is not None
    stored = _create(found.create, settings)
    if model.inc is None:
        return stored
    inc = FORMATS["inc"].rounds
    assert inc is not None
    on_stored: type[Quantization] = load_class(
        "vllm.model_executor.quantization.inc.stored:IncOnStored"
    )
    return on_stored(_create(inc, model.inc), stored)  # type: ignore[call-arg]


def head_quantization_of(model: ModelConfig) -> Quantization | None:
    """Return the format for output heads that are dense otherwise; None: they stay dense."""
    if model.lm_head_quantization == "auto":
        return None
    create: Callable[[], Quantization] = load_class(f"{_PACKAGE}.cpu_packed:CPUInt8Head")
    return create()


def _create(create: str | CreateQuantization, settings: Any) -> Quantization:
    made: CreateQuantization = load_class(create) if isinstance(create, str) else create
    return made(settings)
