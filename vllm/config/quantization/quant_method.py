"""Read the format of a quantized checkpoint from its config.json."""

from vllm.config.arch.model_arch import ModelArch
from vllm.config.quantization.settings_error import SettingsError, naming_settings_file, setting

_USUAL_NAMES = {
    "compressed_tensors": "compressed-tensors",
    "auto_round": "auto-round",
    "gptq_marlin": "gptq",
    "awq_marlin": "awq",
}


def quant_method(arch: ModelArch) -> str | None:
    """Return the format of the checkpoint; None: it is not quantized.

    Raises:
        ConfigError: `quantization_config` is not an object, or does not name the format.
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
    """Return the name of a format in the spelling of the table of formats.

    >>> usual_name("Compressed_Tensors")
    'compressed-tensors'
    """
    return _USUAL_NAMES.get(name.lower(), name.lower())
