"""Whether weights can be stored as `--quantization` asks for."""

from vllm.config import ModelConfig
from vllm.errors import ConfigError
from vllm.platforms import Platform

_DTYPES = ("bfloat16", "float32")
"""Of models whose weights can be rounded."""


def check_quantization(model: ModelConfig, platform: Platform) -> None:
    """Refuse a quantization that this model or platform has not.

    A checkpoint that is quantized says so itself; naming its own format again changes nothing.

    Args:
        model: with its arch and a dtype that is not "auto".
        platform: that runs it.

    Raises:
        ConfigError: the format is not known here, or does not go with the checkpoint.
    """
    asked = model.quantization
    if asked is None:
        return
    own = (model.resolved_arch.hf_config.get("quantization_config") or {}).get("quant_method")
    if own is not None:
        if own != asked:
            raise ConfigError(
                f"quantization={asked!r}: the checkpoint is quantized already, with {own!r}; "
                f"leave the argument out"
            )
        return
    if asked not in platform.quantizations:
        known = " and ".join(platform.quantizations) or "none"
        raise ConfigError(
            f"quantization={asked!r} is not available for an unquantized checkpoint on the device "
            f"{platform.name!r}; available: {known}"
        )
    if model.dtype_name not in _DTYPES:
        raise ConfigError(
            f"quantization={asked!r} needs dtype {' or '.join(_DTYPES)}, got {model.dtype_name}"
        )
