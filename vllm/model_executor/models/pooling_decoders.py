"""Pooling models made from generative families: the decoder with another head, or none."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor, nn

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.model_executor.layers.embedding import VocabParallelEmbedding
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.bert import num_labels
from vllm.model_executor.models.interface import CausalLM, PoolingModel
from vllm.model_executor.models.llama import (
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

_PREFIXES: Mapping[str, str] = {
    "score.": "score.",
    # A decoder that was saved without its output head lacks the first level of its names.
    "embed_tokens.": "decoder.model.embed_tokens.",
    "layers.": "decoder.model.layers.",
    "norm.": "decoder.model.norm.",
    "": "decoder.",
}


class DecoderPooling(PoolingModel):
    """The decoder of a `CausalLM` without its output head.

    It loads checkpoints of the generative model and of the bare decoder.
    """

    generative_class: ClassVar[type[CausalLM]]

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = _PREFIXES
    ignored_tensors: ClassVar[tuple[str, ...]] = (*PoolingModel.ignored_tensors, "lm_head.weight")

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp)
        self.decoder = self.generative_class(arch, tp)
        # No memory is wasted: the head was built on the meta device.
        self.decoder._modules.pop("lm_head", None)

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Convert tensors of the decoder with the rules of the generative model."""
        inner = name.removeprefix("decoder.")
        if inner == name:
            return ((name, source),)
        parts = self.decoder.convert(inner, source)
        return ((f"decoder.{part}", tensor) for part, tensor in parts)

    @property
    def layers(self) -> Sequence[nn.Module]:
        return self.decoder.layers

    def modules_around_layers(self) -> tuple[list[nn.Module], list[nn.Module]]:
        first, last = self.decoder.modules_around_layers()
        return first, last + [module for module in self.children() if module is not self.decoder]

    @property
    def embedding(self) -> VocabParallelEmbedding:
        return self.decoder.embedding

    def run_layers(
        self,
        hidden_states: Tensor,
        positions: Tensor,
        first: int,
        end: int,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        return self.decoder.run_layers(hidden_states, positions, first, end)


class DecoderForSequenceClassification(DecoderPooling):
    """A decoder with a linear classifier on the last token."""

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp)
        self.score = nn.Linear(arch.hidden_size, num_labels(arch), bias=False)

    def head(self, pooled: Tensor) -> Tensor:
        """Compute the logits of the labels [N, labels] from pooled hidden states [N, hidden]."""
        return self.score(pooled)


class Qwen2ForRewardModel(DecoderPooling):
    """A reward model: an MLP computes one reward per token (Qwen2.5-Math-RM)."""

    generative_class = Qwen2ForCausalLM
    num_rewards: ClassVar[int] = 1

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp)
        size = arch.hidden_size
        self.score = nn.Sequential(
            nn.Linear(size, size), nn.ReLU(), nn.Linear(size, self.num_rewards)
        )

    def head(self, pooled: Tensor) -> Tensor:
        """Compute the rewards [N, num_rewards] from pooled hidden states [N, hidden]."""
        return self.score(pooled)


class Qwen2ForProcessRewardModel(Qwen2ForRewardModel):
    """A process reward model: two logits, wrong and right, at the last token of each step. Used by
    Qwen2.5-Math-PRM.
    """

    num_rewards: ClassVar[int] = 2


def pooling_class(
    name: str, generative_class: type[CausalLM], base: type[DecoderPooling] = DecoderPooling
) -> type[DecoderPooling]:
    """Make a pooling model class from the decoder of a generative class, with the head of
    `base`.
    """
    prefixes = {old: f"decoder.{new}" for old, new in generative_class.checkpoint_prefixes.items()}
    values = {
        "generative_class": generative_class,
        "checkpoint_prefixes": {**prefixes, **_PREFIXES},
        "checkpoint_names": generative_class.checkpoint_names,
        "ignored_tensors": (*generative_class.ignored_tensors, "lm_head.weight"),
    }
    return type(name, (base,), values)


def embedding_class(generative_class: type[CausalLM]) -> type[DecoderPooling]:
    """Make an embedding model class (task=embed) from a generative one."""
    return pooling_class(f"{generative_class.__name__}ForEmbedding", generative_class)


# Architecture names in checkpoints: plain decoders for embeddings, and decoders with a classifier.
LlamaModel = pooling_class("LlamaModel", LlamaForCausalLM)
MistralModel = pooling_class("MistralModel", MistralForCausalLM)
Qwen2Model = pooling_class("Qwen2Model", Qwen2ForCausalLM)
Qwen3Model = pooling_class("Qwen3Model", Qwen3ForCausalLM)
LlamaForSequenceClassification = pooling_class(
    "LlamaForSequenceClassification", LlamaForCausalLM, DecoderForSequenceClassification
)
MistralForSequenceClassification = pooling_class(
    "MistralForSequenceClassification", MistralForCausalLM, DecoderForSequenceClassification
)
Qwen2ForSequenceClassification = pooling_class(
    "Qwen2ForSequenceClassification", Qwen2ForCausalLM, DecoderForSequenceClassification
)
Qwen3ForSequenceClassification = pooling_class(
    "Qwen3ForSequenceClassification", Qwen3ForCausalLM, DecoderForSequenceClassification
)
