"""Returns the transcription rules of the model of an engine."""

from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.multimodal.interface.family import TokenLookup
from vllm.multimodal.interface.speech import SpeechRules
from vllm.multimodal.job import family_of_model
from vllm.utils.files.json_file import read_json_object


def speech_of_model(config: VllmConfig, token_id: TokenLookup) -> SpeechRules | None:
    """Return the transcription rules of the model of an engine; None if it does not transcribe.

    Args:
        config: complete and consistent.
        token_id: looks up tokens of the tokenizer; raises ConfigError if there is none.

    Raises:
        ConfigError: config.json, generation_config.json or the settings of the feature extractor
            cannot be used.
    """
    family = family_of_model(config)
    if family is None:
        return None
    return family.speech(_generation_config(config), token_id)


def _generation_config(config: VllmConfig) -> dict[str, Any]:
    """Return the content of generation_config.json; {} if the model has none."""
    folder = Path(config.model.hf_config_path or config.model.resolved_path)
    file = folder / "generation_config.json"
    return read_json_object(file) if file.is_file() else {}
