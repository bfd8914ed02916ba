"""The language model of a checkpoint that also has a part for images.

Such a config.json has the language model's in `text_config`. It is read as if it were that of the
language model alone; only its `architectures` still names the whole.
"""

from collections.abc import Mapping
from typing import Any

from vllm.config.families import TEXT_TYPES
from vllm.errors import ConfigError

_OF_THE_WHOLE = (
    *("architectures", "quantization_config", "dtype", "torch_dtype"),
    "tie_word_embeddings",
    *("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"),
)
"""Keys that are taken from the whole where it has them."""


def text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw`, or the config of the language model in it.

    Args:
        raw: values of config.json.

    Raises:
        ConfigError: the language model is missing, or of another family than the architecture has.
    """
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    wanted = TEXT_TYPES.get(name) if isinstance(name, str) else None
    text = raw.get("text_config")
    if wanted is None or (text is None and raw.get("model_type") == wanted):
        return dict(raw)
    if not isinstance(text, Mapping):
        raise ConfigError(
            f"config.json of {name} has no 'text_config', which describes its language model. "
            f"Download the file again"
        )
    model_type = text.get("model_type") or wanted
    if model_type != wanted:
        raise ConfigError(
            f"config.json: the language model of {name} must be of model_type {wanted!r}, got "
            f"{model_type!r}, which has no modules here"
        )
    whole = {key: raw[key] for key in _OF_THE_WHOLE if raw.get(key) is not None}
    return {**text, **whole, "model_type": model_type}
