"""The decoder of Whisper: learned positions, and in every layer cross-attention to the sound."""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.model_executor.layers.activation import get_activation
from vllm.model_executor.layers.cross_attention import CrossAttention
from vllm.model_executor.layers.embedding import (
    LearnedPositionalEmbedding,
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.norm import LayerNorm
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.interface import CausalLM
from vllm.model_executor.models.opt import OPTAttention

_QUERY_BIAS, _KEY_BIAS = ".self_attn.q_proj.bias", ".self_attn.k_proj.bias"


class WhisperDecoderLayer(nn.Module):
    """Self-attention, cross-attention to the sound and an MLP, each with a norm before it.

    Shape: [T, hidden] -> [T, hidden]
    """

    activation: Callable[[Tensor], Tensor]

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__()
        size, inner = arch.hidden_size, arch.intermediate_size
        self.self_attn = OPTAttention(arch, has_bias=True, tp=tp)
        self.self_attn_layer_norm = LayerNorm(size)
        self.encoder_attn = CrossAttention(
            size, arch.num_heads, arch.num_heads, arch.head_size, tp, qvo_bias=True
        )
        self.encoder_attn_layer_norm = LayerNorm(size)
        self.fc1 = ColumnParallelLinear(size, {"": inner}, tp, bias=True)
        self.activation = get_activation(arch.hidden_act)
        self.fc2 = RowParallelLinear(inner, size, tp, bias=True)
        self.final_layer_norm = LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x))
        if self.encoder_attn.is_read:
            x = x + self.encoder_attn(self.encoder_attn_layer_norm(x))
        return x + self.fc2(self.activation(self.fc1(self.final_layer_norm(x))))


class WhisperDecoder(nn.Module):
    """Token and position embeddings, layers and the final norm."""

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__()
        size = arch.hidden_size
        self.embed_tokens = VocabParallelEmbedding(arch.vocab_size, size, tp)
        self.embed_positions = LearnedPositionalEmbedding(arch.max_position_embeddings, size)
        self.layers = nn.ModuleList(WhisperDecoderLayer(arch, tp) for _ in range(arch.num_layers))
        self.layer_norm = LayerNorm(size)

    def run_layers(self, x: Tensor, positions: Tensor, first: int, end: int) -> Tensor:
        """Run consecutive layers; see `CausalLM.run_layers`."""
        if first == 0:
            x = x + self.embed_positions(positions)
        for index in range(first, end):
            x = self.layers[index](x)
        return self.layer_norm(x) if end == len(self.layers) else x


class WhisperModel(nn.Module):
    """The decoder; the level `model` of the checkpoint's names."""

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__()
        self.decoder = WhisperDecoder(arch, tp)


class WhisperForCausalLM(CausalLM):
    """The decoder of Whisper with its output head (Radford et al. 2022, arXiv 2212.04356)."""

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {"proj_out.": "lm_head."}
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        ".encoder_attn.out_proj.": ".encoder_attn.o_proj."
    }

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp)
        self.model = WhisperModel(arch, tp)
        self.lm_head = ParallelLMHead(arch.vocab_size, arch.hidden_size, tp)
        if arch.tie_word_embeddings:
            self.lm_head.tie(self.model.decoder.embed_tokens)

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Add a zero bias of keys, because query, key and value are one matmul with one
        bias here.
        """
        yield name, source
        if name.endswith(_QUERY_BIAS):
            yield name.removesuffix(_QUERY_BIAS) + _KEY_BIAS, source.mapped(torch.zeros_like)

    @property
    def layers(self) -> Sequence[nn.Module]:
        return list(self.model.decoder.layers)

    def modules_around_layers(self) -> tuple[list[nn.Module], list[nn.Module]]:
        decoder = self.model.decoder
        return [decoder.embed_tokens, decoder.embed_positions], [decoder.layer_norm, self.lm_head]

    @property
    def embedding(self) -> VocabParallelEmbedding:
        return self.model.decoder.embed_tokens

    def run_layers(self, hidden_states: Tensor, positions: Tensor, first: int, end: int) -> Tensor:
        return self.model.decoder.run_layers(hidden_states, positions, first, end)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.lm_head(hidden_states)
