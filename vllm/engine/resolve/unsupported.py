"""Create errors for checkpoints that cannot run, which name the main reason, whatever else
config.json lacks.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.config.arch.model_arch import missing_keys
from vllm.config.families import family_of
from vllm.errors import ConfigError
from vllm.model_executor.models.registry import ModelRegistry

_PARTS = (
    *("text_config", "llm_config", "language_config", "thinker_config"),
    *("vision_config", "audio_config", "encoder", "encoder_config", "decoder", "decoder_config"),
    *("talker_config", "vision", "audio_encoder", "visual"),
)
"""Keys with the config of a part of a model; language models come first."""
_TEXT_PARTS = _PARTS[:4]

_WHY_NOT = {
    "paligemma": (
        "all tokens of its prompts attend to each other, so a prompt cannot be computed in parts"
    ),
    "granite_speech": (
        "its feature extractor in transformers needs torchaudio, which this engine does not use"
    ),
}
"""Model types whose images or sounds were considered and left out, and why."""


def no_architecture(raw: Mapping[str, Any], folder: Path) -> ConfigError:
    """Return the error for a config.json that names no architecture.

    Args:
        raw: values of config.json.
        folder: folder of the file.
    """
    if "_class_name" in raw:  # config of a diffusers pipeline
        return ConfigError(
            f"config.json of '{folder}' describes {raw['_class_name']}, a part of a diffusers "
            "model that makes images. Use a language model"
        )
    if given := raw.get("architectures"):
        return ConfigError(
            f"config.json of '{folder}': 'architectures' must be a list with the class of the "
            f'model, such as ["LlamaForCausalLM"], got {str(given)[:80]!r}. Correct the file, or '
            "give another value with hf_overrides"
        )
    kind = raw.get("model_type")
    names = family_of(kind).architectures or ("LlamaForCausalLM",)
    hint = ""
    if isinstance(kind, str):
        hint = f"; it does not follow from its model_type {kind!r}"
    return ConfigError(
        f"config.json of '{folder}' has no 'architectures', the list with the class of the model"
        f'{hint}. Give it with hf_overrides, such as {{"architectures": ["{names[-1]}"]}}, '
        f"if it is a language model"
    )


def unsupported(architecture: str, raw: Mapping[str, Any]) -> ConfigError:
    """Return the error for an architecture that neither this package nor transformers can run.

    Args:
        architecture: name in config.json.
        raw: values of config.json.
    """
    reason, nearest = _kind(raw)
    if not reason:
        reason = ", and the installed transformers has no decoder of that name either"
    if raw.get("auto_map"):
        reason += ". The code of a model that comes with it (auto_map) is never run"
    return ConfigError(ModelRegistry.unsupported_message(architecture, reason, nearest))


def check_described(completed: Mapping[str, Any], raw: Mapping[str, Any]) -> None:
    """Refuse a model that transformers knows, but whose config does not describe a decoder.

    Args:
        completed: `raw` with the defaults of its model type.
        raw: values of config.json.

    Raises:
        ConfigError: keys that every decoder needs are missing.
    """
    missing = missing_keys(completed)
    if not missing:
        return
    reason, nearest = _kind(raw)
    if not reason:
        reason = (
            ": its config in transformers lacks values that are needed to run it "
            f"({', '.join(missing)})"
        )
    raise ConfigError(ModelRegistry.unsupported_message(raw["architectures"][0], reason, nearest))


def _kind(raw: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return why a model of this kind cannot run, as the end of a sentence, and the supported
    language models in it.

    The reason is empty if the model may be a decoder like others.
    """
    if raw.get("is_encoder_decoder"):
        return ": it is an encoder-decoder model of a kind that this engine cannot run", []
    parts = [name for name in _PARTS if isinstance(raw.get(name), Mapping)]
    if parts:
        types = [raw[name].get("model_type") for name in _TEXT_PARTS if name in parts]
        families = [family_of(kind) for kind in types]
        own = [family.architectures[0] for family in families if family.architectures]
        reason = f": it has parts for other input than text ({', '.join(parts)})"
        if why := _WHY_NOT.get(str(raw.get("model_type"))):
            reason += f" that do not run ({why})"
        if own:
            reason += (
                f". Its language model ({own[0]}) can run if it is saved as a checkpoint without "
                "the other parts"
            )
        else:
            reason += ". See docs/multimodal.md for the multimodal models that can run"
        return reason, own
    return "", []
