"""The name of the format of a quantized checkpoint, as its config.json says it."""

from vllm.config.arch.model_arch import ModelArch
from vllm.config.quantization.settings_error import SettingsError, naming_settings_file, setting

_USUAL_NAMES = {"compressed_tensors": "compressed-tensors", "auto_round": "auto-round"}


def quant_method(arch: ModelArch) -> str | None:
    """Return the format; None: the checkpoint is not quantized.

    Raises:
        ConfigError: `quantization_config` is no object, or does not say.
    """
    settings = arch.hf_config.get("quantization_config")
    if not settings:
        return None
    if not isinstance(settings, dict) or not isinstance(settings.get("quant_method"), str):
        with naming_settings_file(arch.hf_config):
            raise SettingsError(
                f"{setting()} must be an object with the string quant_method, the name of the "
                "format, such as gptq or awq. Add it, or use another checkpoint"
            )
    return usual_name(settings["quant_method"])


def usual_name(name: str) -> str:
    """Return the name of a format as it is in the table of formats.

    >>> usual_name("Compressed_Tensors")
    'compressed-tensors'
    """
    return _USUAL_NAMES.get(name.lower(), name.lower())
