"""The base class of quantized checkpoint formats: which layers are quantized, and how.

The settings of a checkpoint use its own module names. So a layer is looked up by all names that it
may have: its own, the name of the layer that it is fused with, and the names from which the model
renames it.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from torch import nn

from vllm.config.quantization.settings_error import SettingsError, setting
from vllm.model_executor.layers.embedding import (
    EmbeddingMethod,
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.layers.experts import Experts, ExpertsMethod
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.model_executor.layers.stored.stored_experts import StoredExperts
from vllm.model_executor.layers.stored.stored_linear import StoredHead, StoredLinear
from vllm.model_executor.quantization.format_lines import log_formats
from vllm.model_executor.quantization.interface import Quantization
from vllm.model_executor.quantization.settings import is_listed, part_names

Storage = TypeVar("Storage")
"""Storage of a layer, in the terms of a format."""

Names = Sequence[str]
"""All names that one layer may have in the settings, its own first."""


class CheckpointFormat(Quantization, Generic[Storage]):
    """A quantized checkpoint format, with the settings of one checkpoint."""

    ignored: Sequence[str] = ()
    """Layers that are dense by the settings."""
    telling_tensor: str | None = None
    """The last part of the name of a tensor that only quantized layers have. It shows whether the
    output head is quantized, because settings may not mention a dense head. None: no tensor
    shows it."""

    @abstractmethod
    def storage(self, names: Names) -> Storage | None:
        """Return how the layer with these names is stored; None if it is dense.

        Not called for layers that `ignored` lists.
        """

    @abstractmethod
    def method(self, name: str, storage: Storage) -> LinearMethod:
        """Create the weight method of a layer.

        Args:
            name: name of the layer, for errors.
            storage: storage from `storage_of`.
        """

    def is_ignored(self, names: Names) -> bool:
        """Return whether `ignored` lists a layer with one of these names."""
        return is_listed(names, self.ignored)

    def storage_of(self, names: Names) -> Storage | None:
        """Return how the layer with these names is stored; None if it is dense."""
        return None if self.is_ignored(names) else self.storage(names)

    def rule_for(self, names: Names) -> str | None:
        """Return the rule of the settings that decided about a layer, for messages; None:
        no rule.
        """
        return None

    def described(self, storage: Storage) -> str | None:
        """Return the name of a layer's format for the log; None if the log does not mention the
        layer.
        """
        return None

    def stores_head(self, names: Names) -> bool:
        """Return whether an untied output head with these names may be quantized.

        If so, `storage_of` is asked.
        """
        return self.telling_tensor is not None and self.has_tensor(names, self.telling_tensor)

    def linear_method(self, name: str, layer: ParallelLinear) -> LinearMethod | None:
        if layer.keeps_precision:
            return None
        # First compare the parts by their own names only: a rule for one part, such as
        # ".*v_proj", may also match the name of the whole, qkv_proj.
        parts = [self.names_of(part) for part in part_names(name, layer)]
        own = [self.storage_of(names) for names in parts]
        if any(each != own[0] for each in own):
            raise self._differing(parts)
        whole = self.names_of(name)
        found = [self.storage_of([*names, *whole]) for names in parts]
        return None if found[0] is None else self._noted(found[0], self.method(name, found[0]))

    def embedding_method(self, name: str, layer: VocabParallelEmbedding) -> EmbeddingMethod | None:
        is_head = isinstance(layer, ParallelLMHead) and not layer.is_tied
        names = self.names_of(name)
        if not is_head or not self.stores_head(names):
            return None
        storage = self.storage_of(names)
        if storage is None:
            return None
        return StoredHead(self._noted(storage, self.method(name, storage)))

    def experts_method(self, name: str, layer: Experts) -> ExpertsMethod | None:
        # The first expert decides, because all experts of a layer must be stored alike.
        storage = self.storage_of(self.names_of(first_matrix(name, layer)))
        if storage is None:
            return None
        experts = StoredExperts(name)
        experts.stored_as = self.described(storage)
        return experts

    def _differing(self, parts: Sequence[Names]) -> SettingsError:
        rules: dict[str, list[str]] = {}
        for names in parts:
            if (rule := self.rule_for(names)) is not None:
                rules.setdefault(rule, []).append(names[0])
        said = "; ".join(f"the rule {rule!r} is for {', '.join(of)}" for rule, of in rules.items())
        return SettingsError(
            f"{setting()} leaves some of {', '.join(names[0] for names in parts)} unquantized, or "
            f"stores them in different ways{f' ({said})' if said else ''}; they run as one layer, "
            f"so it must be the same for all. Quantize the model again with the same settings for "
            f"them"
        )

    def finish_model(self, model: nn.Module) -> None:
        log_formats(model)

    def _noted(self, storage: Storage, method: LinearMethod) -> LinearMethod:
        if isinstance(method, StoredLinear):
            method.stored_as = self.described(storage)
        return method

    def has_tensor(self, names: Names, tensor: str) -> bool:
        """Return whether the files contain a tensor of the module whose name ends with `tensor`."""
        return any(self.names.has_tensor(f"{name}.{tensor}") for name in names)

    def names_of(self, name: str) -> list[str]:
        """Return all names that a module may have in the settings or files; its own name first."""
        return [name, *self.names.of_module(name)]


class NamedFormat(CheckpointFormat[Storage]):
    """A format in which `telling_tensor` shows which layers are quantized.

    `ignored` may be incomplete.
    """

    telling_tensor: str

    def is_stored(self, names: Names) -> bool:
        """Return whether the files have the telling tensor of a layer with one of these names."""
        return self.has_tensor(names, self.telling_tensor)

    def storage_of(self, names: Names) -> Storage | None:
        is_dense = self.has_tensor(names, "weight") or self.is_ignored(names)
        return None if is_dense and not self.is_stored(names) else self.storage(names)

    def experts_method(self, name: str, layer: Experts) -> ExpertsMethod | None:
        is_stored = self.is_stored(self.names_of(first_matrix(name, layer)))
        return super().experts_method(name, layer) if is_stored else None


def first_matrix(name: str, layer: Experts) -> str:
    """Return the name of the first matrix of the first expert of the module `name`."""
    return f"{name}.0.{layer.options.parts[0]}"
