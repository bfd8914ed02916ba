"""The model class of each architecture. Importing this module imports neither models nor torch."""

import difflib
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from vllm.config.families import FAMILIES, family_of_architecture
from vllm.errors import ConfigError

_PACKAGE = "vllm.model_executor.models"

BY_TRANSFORMERS = "TransformersForCausalLM"
"""The architecture that stands for every other one that the transformers library knows."""
TEXT_BY_TRANSFORMERS = "TransformersForConditionalGeneration"
"""The same, where a checkpoint also has a part for images."""


def _built_in() -> Iterator[tuple[str, str]]:
    """Yield each architecture of the table of families, and its "module:Class"."""
    for family in FAMILIES.values():
        if family.module:
            classes = {name: name for name in family.architectures}
            classes |= dict.fromkeys(family.also_published_as, family.architectures[0])
            for name, class_name in classes.items():
                yield name, f"{_PACKAGE}.{family.module}:{class_name}"
        for name in family.pooling_architectures:
            yield name, f"{_PACKAGE}.pooling_decoders:{name}"
    yield BY_TRANSFORMERS, f"{_PACKAGE}.transformers_model:{BY_TRANSFORMERS}"
    yield TEXT_BY_TRANSFORMERS, f"{_PACKAGE}.text_of_images:{TEXT_BY_TRANSFORMERS}"


_BUILT_IN = dict(_built_in())


class _ModelRegistry:
    """Architecture (as in `architectures` of config.json) -> model class."""

    def __init__(self, models: dict[str, str | type[Any]]) -> None:
        self._models = models

    def register_model(self, arch_name: str, model: str | type[Any]) -> None:
        """Add an architecture, or replace a built-in one.

        Args:
            arch_name: name in config.json.
            model: a subclass of `CausalLM` or `PoolingModel` of `models.interface`, or
                "module:Class", which is imported when a model of this name is loaded.

        Raises:
            ConfigError: a string that is not "module:Class".
        """
        if isinstance(model, str) and not all(model.partition(":")):
            raise ConfigError(f"model {arch_name!r}: expected 'module:Class', got {model!r}")
        self._models[arch_name] = model

    def plugins(self) -> dict[str, str]:
        """The registered plug-ins that can be sent to another process."""
        return {
            name: model
            for name, model in self._models.items()
            if isinstance(model, str) and _BUILT_IN.get(name) != model
        }

    def supported(self) -> list[str]:
        return sorted(self._models)

    def resolve(self, arch_name: str) -> type[Any]:
        """The class of an architecture.

        Raises:
            ConfigError: unknown name, or a plug-in that cannot be imported.
        """
        model = self._models.get(arch_name)
        if model is None:
            raise ConfigError(self.unsupported_message(arch_name))
        if not isinstance(model, str):
            return model
        module, _, name = model.partition(":")
        try:
            found: type[Any] = getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"model {arch_name!r}: cannot import {model!r}: {error}") from error
        return found

    def unsupported_message(self, arch_name: str, elsewhere: str = "") -> str:
        """What an error says about an architecture that is not in the registry.

        Args:
            arch_name: name in config.json.
            elsewhere: whether transformers has it, as the end of a sentence.
        """
        names = self.supported()
        near = difflib.get_close_matches(arch_name, names, n=3)
        hint = f" (the nearest: {', '.join(near)})" if near else ""
        return (
            f"model architecture {arch_name!r} is not supported{hint}{elsewhere}; "
            f"supported architectures: {', '.join(names)}"
        )


def is_encoder(arch_name: str) -> bool:
    """Whether it is an encoder: all tokens of a prompt see each other, and none is generated."""
    return family_of_architecture(arch_name).is_encoder


ModelRegistry = _ModelRegistry(dict(_BUILT_IN))
"""The registry of this process; plug-ins add to it."""
