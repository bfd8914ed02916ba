"""Make the config object of transformers from the values that were read from config.json."""

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm.config.arch.model_arch import WHOLE_CONFIG, ModelArch
from vllm.config.arch.sizes import HIDDEN_SIZE

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    ConfigObject: TypeAlias = PretrainedConfig


def config_object(arch: ModelArch) -> "PretrainedConfig":
    """Return the config of a model, as `transformers.AutoConfig` would return it.

    It is a new object, which the engine does not read. Its class belongs to the model type, or is
    `PretrainedConfig` if transformers does not know the type or refuses a value.
    """
    values = dict(arch.hf_config)
    whole = values.pop(WHOLE_CONFIG, None)
    if isinstance(whole, Mapping):
        text = values
        values = dict(whole)
        if values.keys().isdisjoint(HIDDEN_SIZE):
            values["text_config"] = text
    values.setdefault("architectures", [arch.architecture])
    return _make(values)


def _make(values: dict[str, Any]) -> "PretrainedConfig":
    from transformers import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = values.get("model_type")
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[model_type]
        # Exceptions of various types: this engine accepts values that transformers refuses.
        with suppress(Exception):
            return config_class.from_dict(values)
    return PretrainedConfig.from_dict(values)
