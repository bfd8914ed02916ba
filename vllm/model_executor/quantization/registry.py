"""Quantization formats by the name a checkpoint gives them (`quant_method`)."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from vllm.config import ModelArch
from vllm.errors import ConfigError
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear


class Quantization(Protocol):
    """One format with the settings of one checkpoint."""

    def linear_method(self, name: str, layer: ParallelLinear) -> LinearMethod | None:
        """How the layer of this module name is stored; None: as dense weights."""
        ...


_formats: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {}


def register_quantization(name: str, create: Callable[[Mapping[str, Any]], Quantization]) -> None:
    """Add a format; `create` gets the checkpoint's `quantization_config`."""
    _formats[name] = create


def quantization_of(arch: ModelArch) -> Quantization | None:
    """The format of a checkpoint, or None when its weights are dense.

    Raises:
        ConfigError: the checkpoint is quantized in a format that is not supported.
    """
    settings = arch.hf_config.get("quantization_config")
    if not settings:
        return None
    name = str(settings.get("quant_method"))
    if name not in _formats:
        raise ConfigError(
            f"the checkpoint is quantized with {name!r}, which is not supported; "
            f"supported: {', '.join(sorted(_formats)) or 'unquantized checkpoints only'}"
        )
    return _formats[name](settings)
