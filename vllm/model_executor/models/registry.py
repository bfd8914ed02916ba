"""Maps each architecture to its model class.

Importing this module imports neither models nor torch.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from vllm.config.families import FAMILIES, family_of_architecture, usual_architecture
from vllm.errors import ConfigError

_PACKAGE = "vllm.model_executor.models"

BY_TRANSFORMERS = "TransformersForCausalLM"
"""The architecture for all other ones of the transformers library."""
TEXT_BY_TRANSFORMERS = "TransformersForConditionalGeneration"
"""The architecture for other ones whose checkpoints also have a part for images."""


def _built_in() -> Iterator[tuple[str, str]]:
    """Yield each built-in architecture with its "module:Class"."""
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
    """Maps an architecture (from `architectures` in config.json) to its model class."""

    def __init__(self, models: dict[str, str | type[Any]]) -> None:
        self.models = models

    def register_model(self, arch_name: str, model: str | type[Any]) -> None:
        """Register a model class for an architecture; may replace a built-in one.

        Args:
            arch_name: name in config.json.
            model: a subclass of `CausalLM` or `PoolingModel` of `models.interface`, or
                "module:Class", which is imported when a model of this name is loaded.

        Raises:
            ConfigError: a string that is not "module:Class".
        """
        if isinstance(model, str) and not all(model.partition(":")):
            raise ConfigError(f"model {arch_name!r}: expected 'module:Class', got {model!r}")
        self.models[arch_name] = model

    def plugins(self) -> dict[str, str]:
        """Return the models registered as "module:Class", which can be sent to another process."""
        return {
            name: model
            for name, model in self.models.items()
            if isinstance(model, str) and _BUILT_IN.get(name) != model
        }

    def supported(self) -> list[str]:
        return sorted(self.models)

    def resolve(self, arch_name: str) -> type[Any]:
        """Import and return the class of an architecture.

        Raises:
            ConfigError: unknown name, or a plug-in that cannot be imported.
        """
        model = self.models.get(arch_name)
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

    def unsupported_message(
        self, arch_name: str, reason: str = "", nearest: Sequence[str] = ()
    ) -> str:
        """Return the error text about an architecture that is not supported.

        Args:
            arch_name: name in config.json.
            reason: why it is not supported; appended to the sentence. Empty: unknown.
            nearest: similar supported architectures to suggest; empty: suggest similar names.
        """
        near = nearest or self._with_similar_names(arch_name)
        hint = f" (the nearest: {', '.join(near)})" if near else ""
        return (
            f"model architecture {arch_name!r} is not supported{hint}{reason}. Use a checkpoint of "
            f"one of the {len(self.supported())} supported architectures, which "
            f"docs/supported_models.md and ModelRegistry.supported() list, or add a class "
            f"of your own with ModelRegistry.register_model"
        )

    def _with_similar_names(self, arch_name: str) -> list[str]:
        """Return supported architectures with similar names, the most similar ones first.

        Common endings are ignored. The beginning of a name counts most, since versions and sizes of
        a family differ at the end.
        """
        stems: dict[str, list[str]] = {}
        for name in self.supported():
            is_model = name not in (BY_TRANSFORMERS, TEXT_BY_TRANSFORMERS)
            if is_model and usual_architecture(name) == name:
                stems.setdefault(_stem(name), []).append(name)
        wanted, found = _stem(arch_name), []
        for stem in stems:
            matcher = difflib.SequenceMatcher(None, stem, wanted)
            first, ratio = matcher.get_matching_blocks()[0], matcher.ratio()
            begun = first.size if first.a == first.b == 0 else 0
            if ratio >= 0.65 or begun >= max(5, 0.6 * len(stem)):
                found.append((-begun, -ratio, stem))
        return [name for *_, stem in sorted(found) for name in stems[stem]][:3]


def _stem(arch_name: str) -> str:
    """Return the distinguishing part of an architecture's name in lower case, without common
    endings.
    """
    return re.sub(r"(For[A-Z][A-Za-z]+|LMHeadModel|Model)$", "", arch_name).lower()


def is_encoder(arch_name: str) -> bool:
    """Return whether the architecture is an encoder: prompt tokens attend to each other, none is
    generated.
    """
    return family_of_architecture(arch_name).is_encoder


ModelRegistry = _ModelRegistry(dict(_BUILT_IN))
"""The registry of this process; plug-ins add to it."""
