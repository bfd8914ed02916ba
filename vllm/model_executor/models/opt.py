"""OPT: learned positions, layer norms with biases and a plain MLP."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor, nn

from vllm.attention import Attention
from vllm.config import ModelArch
from vllm.distributed import TPGroup, divide
from vllm.model_executor.layers.activation import get_activation
from vllm.model_executor.layers.embedding import (
    LearnedPositionalEmbedding,
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear, dense_linear
from vllm.model_executor.layers.norm import LayerNorm
from vllm.model_executor.models.interface import CausalLM

_POSITION_OFFSET = 2
"""The first two rows of the position table belong to padding."""


class OPTAttention(nn.Module):
    """Multi-head attention without rotary positions; hidden states already contain positions.

    Shape: [T, hidden] -> [T, hidden]
    """

    def __init__(self, arch: ModelArch, has_bias: bool, tp: TPGroup) -> None:
        super().__init__()
        size = arch.hidden_size
        self.head_size = arch.head_size
        self.qkv_proj = ColumnParallelLinear(
            size, {"q_proj": size, "k_proj": size, "v_proj": size}, tp, bias=has_bias
        )
        self.out_proj = RowParallelLinear(size, size, tp, bias=has_bias)
        num_heads = divide(arch.num_heads, tp.size)
        self.attn = Attention(num_heads, arch.head_size, num_heads)

    def forward(self, hidden_states: Tensor) -> Tensor:
        packed = self.qkv_proj(hidden_states).split(self.qkv_proj.split_sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_size)) for part in packed)
        return self.out_proj(self.attn(q, k, v).flatten(1))


class OPTDecoderLayer(nn.Module):
    """Attention and MLP, with norms before each, or (only OPT-350m) after each residual
    addition.
    """

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__()
        _config, size = arch.hf_config, arch.hidden_size
        has_bias = arch.config_flag("enable_bias", True)
        self.is_pre_norm = arch.config_flag("do_layer_norm_before", True)
        self.self_attn = OPTAttention(arch, has_bias, tp)
        self.self_attn_layer_norm = _layer_norm(arch)
        self.fc1 = ColumnParallelLinear(size, {"": arch.intermediate_size}, tp, bias=has_bias)
        self.act = get_activation(arch.hidden_act)
        self.fc2 = RowParallelLinear(arch.intermediate_size, size, tp, bias=has_bias)
        self.final_layer_norm = _layer_norm(arch)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_pre_norm:
            x = x + self.self_attn(self.self_attn_layer_norm(x))
            return x + self._mlp(self.final_layer_norm(x))
        x = self.self_attn_layer_norm(x + self.self_attn(x))
        return self.final_layer_norm(x + self._mlp(x))

    def _mlp(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class OPTDecoder(nn.Module):
    """Embeddings, layers and, in pre-norm models, the final norm.

    Token embeddings have `word_embed_proj_dim` features. If this differs from the hidden size,
    project_in and project_out convert between the two.
    """

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__()
        size = arch.hidden_size
        self.embed_size = arch.embedding_size
        self.embed_tokens = VocabParallelEmbedding(arch.vocab_size, self.embed_size, tp)
        self.embed_positions = LearnedPositionalEmbedding(
            arch.max_position_embeddings, size, _POSITION_OFFSET
        )
        self.project_in: ColumnParallelLinear | None = None
        self.project_out: ColumnParallelLinear | None = None
        if self.embed_size != size:
            self.project_in = dense_linear(self.embed_size, size, tp)
            self.project_out = dense_linear(size, self.embed_size, tp)
            self.project_out.is_of_head = True
        self.layers = nn.ModuleList(OPTDecoderLayer(arch, tp) for _ in range(arch.num_layers))
        is_pre_norm = arch.config_flag("do_layer_norm_before", True)
        has_final_norm = is_pre_norm and not arch.config_flag("_remove_final_layer_norm")
        self.final_layer_norm = _layer_norm(arch) if has_final_norm else None

    def run_layers(self, x: Tensor, positions: Tensor, first: int, end: int) -> Tensor:
        """Run consecutive layers; see `CausalLM.run_layers`."""
        if first == 0:
            if self.project_in is not None:
                x = self.project_in(x)
            x = x + self.embed_positions(positions)
        for index in range(first, end):
            x = self.layers[index](x)
        if end == len(self.layers) and self.final_layer_norm is not None:
            x = self.final_layer_norm(x)
        return x


class OPTModel(nn.Module):
    """The decoder; the level `model` of the checkpoint's names."""

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__()
        self.decoder = OPTDecoder(arch, tp)


class OPTForCausalLM(CausalLM):
    """OPT 125M to 66B (Zhang et al. 2022, arXiv 2205.01068)."""

    # Checkpoints of 2022 lack the level `model`.
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {"decoder.": "model.decoder."}

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp)
        self.model = OPTModel(arch, tp)
        self.lm_head = ParallelLMHead(arch.vocab_size, self.model.decoder.embed_size, tp)
        if arch.tie_word_embeddings:
            self.lm_head.tie(self.model.decoder.embed_tokens)

    @property
    def layers(self) -> Sequence[nn.Module]:
        return list(self.model.decoder.layers)

    def modules_around_layers(self) -> tuple[list[nn.Module], list[nn.Module]]:
        decoder = self.model.decoder
        first = [decoder.embed_tokens, decoder.embed_positions, decoder.project_in]
        head = getattr(self, "lm_head", None)  # a pooling model has no output head
        last = [decoder.final_layer_norm, decoder.project_out, head]
        return (
            [module for module in first if module is not None],
            [module for module in last if module is not None],
        )

    @property
    def embedding(self) -> VocabParallelEmbedding:
        return self.model.decoder.embed_tokens

    def run_layers(self, hidden_states: Tensor, positions: Tensor, first: int, end: int) -> Tensor:
        return self.model.decoder.run_layers(hidden_states, positions, first, end)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        # Projected here and not in run_layers, because only the tokens that need logits get here.
        if self.model.decoder.project_out is not None:
            hidden_states = self.model.decoder.project_out(hidden_states)
        return self.lm_head(hidden_states)


def _layer_norm(arch: ModelArch) -> LayerNorm:
    has_weight = arch.config_flag("layer_norm_elementwise_affine", True)
    return LayerNorm(arch.hidden_size, has_weight=has_weight)
