"""Multi-token prediction: an extra layer after the last one of a model predicts draft tokens."""

from typing import Any

import torch
from torch import Tensor

from vllm.config import ModelArch
from vllm.config.families import family_of_architecture
from vllm.config.families.family import MTPFormat
from vllm.model_executor.layers.linear import dense_linear
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import LayerSpec, add_norm
from vllm.model_executor.models.interface import CausalLM
from vllm.model_executor.speculators.eagle import rotary_of
from vllm.model_executor.speculators.interface import Speculator

_OF_THE_MODEL = ("embed_tokens.weight", "shared_head.head.weight")
"""Tensors of the model that a checkpoint may hold once more."""


class MTP(Speculator):
    """Runs the first multi-token prediction layer of a model for every draft.

    It is a layer of the model over a projection of an embedding and a hidden state, both normed
    (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2).

    It uses the embeddings and head of the model; copies in the checkpoint are not loaded. Its
    states are hidden states after the norm.
    """

    def __init__(
        self, arch: ModelArch, target: CausalLM, names: frozenset[str] | None = None
    ) -> None:
        super().__init__(arch, target, names)
        decoder: Any = target
        mtp, options = family_of_architecture(arch.architecture).mtp, decoder.model.options
        assert mtp is not None, "the config was checked"
        self._format: MTPFormat = mtp
        size, index = arch.hidden_size, arch.num_layers
        spec = LayerSpec(arch, options, index, rotary_of(arch, options.is_neox), target.tp)
        self.enorm, self.hnorm, self.norm = spec.new_norm(), spec.new_norm(), spec.new_norm()
        self.eh_proj = dense_linear(2 * size, size, target.tp)
        self.layer = type(decoder.model.layers[-1])(spec)
        self._prefix = mtp.prefix.format(index)

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Rename the layer's own tensors to the names of the model's layers; skip all others."""
        own = name.removeprefix(self._prefix)
        if own == name or own in _OF_THE_MODEL:
            return ()
        own = own.removeprefix(self._format.layer_prefix)
        module, _, parameter = own.rpartition(".")
        module = self._format.names.get(module, module)
        if module in ("enorm", "hnorm", "eh_proj", "shared_head.norm"):
            return ((f"{module.removeprefix('shared_head.')}.{parameter}", source),)
        # The target model only converts names of its own layers, so use the name of its last layer.
        last = f"model.layers.{self.arch.num_layers - 1}."
        found = self.target.convert(self.target.renamed(last + own), source)
        return [(f"layer.{each.removeprefix(last)}", part) for each, part in found]

    def step(self, index: int, input_ids: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        parts = [self.enorm(self.target.embedding.look_up(input_ids)), self.hnorm(states)]
        if self._format.is_state_first:
            parts.reverse()
        x = self.eh_proj(torch.cat(parts, dim=-1))
        return add_norm(self.norm, *self.layer(positions, x, None))[0]

    def compute_logits(self, index: int, states: Tensor) -> Tensor:
        return self.target.compute_logits(states)
