"""The decoder that Llama, Mistral, Qwen and many others share, with what differs as options.

Pre-norm blocks of grouped-query attention with rotary positions and a gated MLP. Knows no
device, no KV cache, no phase and no checkpoint file.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from vllm.attention import Attention
from vllm.config import ModelArch
from vllm.distributed import TPGroup, divide
from vllm.errors import ConfigError
from vllm.model_executor.layers.activation import get_gated_activation
from vllm.model_executor.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.norm import RMSNorm
from vllm.model_executor.layers.rotary import RotaryEmbedding
from vllm.model_executor.models.interface import CausalLM


@dataclass(frozen=True, kw_only=True)
class DecoderOptions:
    """What differs between the families."""

    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the projection after attention."""
    mlp_bias: bool = False
    has_head_norm: bool = False
    """RMS norm of every query and key head before the rotation."""


class DecoderAttention(nn.Module):
    """Grouped-query attention with rotary positions.

    Shape: positions [T], hidden_states [T, hidden] -> [T, hidden]
    """

    def __init__(
        self,
        arch: ModelArch,
        options: DecoderOptions,
        window: int | None,
        rotary_emb: RotaryEmbedding,
        tp: TPGroup,
    ) -> None:
        super().__init__()
        self.head_size = arch.head_size
        q_size = arch.num_heads * arch.head_size
        kv_size = arch.num_kv_heads * arch.head_size
        replicas = max(1, tp.size // arch.num_kv_heads)
        self.qkv_proj = ColumnParallelLinear(
            arch.hidden_size,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            tp,
            num_replicas={"k_proj": replicas, "v_proj": replicas},
            bias=options.qkv_bias,
        )
        self.o_proj = RowParallelLinear(q_size, arch.hidden_size, tp, bias=options.output_bias)
        self.q_norm = RMSNorm(arch.head_size, arch.norm_eps) if options.has_head_norm else None
        self.k_norm = RMSNorm(arch.head_size, arch.norm_eps) if options.has_head_norm else None
        self.rotary_emb = rotary_emb
        self.attn = Attention(
            divide(arch.num_heads, tp.size),
            arch.head_size,
            divide(arch.num_kv_heads * replicas, tp.size),
            sliding_window=window,
        )

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        packed = self.qkv_proj(hidden_states).split(self.qkv_proj.split_sizes, dim=-1)
        # [T, heads, head_size] each
        q, k, v = (part.unflatten(-1, (-1, self.head_size)) for part in packed)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v).flatten(1))


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) (SwiGLU and GEGLU, Shazeer 2020, arXiv 2002.05202).

    Shape: [T, hidden] -> [T, hidden]
    """

    def __init__(self, arch: ModelArch, bias: bool, tp: TPGroup) -> None:
        super().__init__()
        size = arch.intermediate_size
        self.gate_up_proj = ColumnParallelLinear(
            arch.hidden_size, {"gate_proj": size, "up_proj": size}, tp, bias=bias
        )
        self.act = get_gated_activation(arch.hidden_act)
        self.down_proj = RowParallelLinear(size, arch.hidden_size, tp, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_up_proj(x)))


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream.

    The addition at the end of a block is left to the norm at the start of the next, which does
    both in one pass. So a layer takes and returns the stream in two parts: what the last block
    put out, and the residual it is to be added to (None before the first layer).
    """

    def __init__(
        self,
        arch: ModelArch,
        options: DecoderOptions,
        window: int | None,
        rotary_emb: RotaryEmbedding,
        tp: TPGroup,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.self_attn = DecoderAttention(arch, options, window, rotary_emb, tp)
        self.post_attention_layernorm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.mlp = GatedMLP(arch, options.mlp_bias, tp)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual = hidden_states
            normed = self.input_layernorm(hidden_states)
        else:
            normed, residual = self.input_layernorm(hidden_states, residual)
        attended = self.self_attn(positions, normed)
        normed, residual = self.post_attention_layernorm(attended, residual)
        return self.mlp(normed), residual


class Decoder(nn.Module):
    """The level `model` of the checkpoint's names: embedding, layers and final norm."""

    def __init__(self, arch: ModelArch, options: DecoderOptions, tp: TPGroup) -> None:
        super().__init__()
        if arch.rope is None:
            raise ConfigError(f"{arch.architecture} needs rope_theta in config.json")
        rotary_emb = RotaryEmbedding(arch.rope, arch.derived_max_model_len)
        self.embed_tokens = VocabParallelEmbedding(arch.vocab_size, arch.hidden_size, tp)
        self.layers = nn.ModuleList(
            DecoderLayer(arch, options, window, rotary_emb, tp) for window in arch.layer_windows
        )
        self.norm = RMSNorm(arch.hidden_size, arch.norm_eps)

    def run_layers(self, hidden_states: Tensor, positions: Tensor, first: int, end: int) -> Tensor:
        """See `CausalLM.run_layers`.

        Between two calls the stream is the sum of its two parts: the next norm would round that
        sum to the same dtype before it does anything else.
        """
        residual: Tensor | None = None
        for index in range(first, end):
            hidden_states, residual = self.layers[index](positions, hidden_states, residual)
        if end < len(self.layers):
            return hidden_states if residual is None else hidden_states + residual
        if residual is None:
            return self.norm(hidden_states)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class DecoderForCausalLM(CausalLM):
    """A `Decoder` with an output head; a family is a subclass that gives the options."""

    def __init__(self, arch: ModelArch, tp: TPGroup, options: DecoderOptions) -> None:
        super().__init__(arch, tp)
        self.model = Decoder(arch, options, tp)
        self.lm_head = ParallelLMHead(arch.vocab_size, arch.hidden_size, tp)
        if arch.tie_word_embeddings:
            self.lm_head.tie(self.model.embed_tokens)

    @property
    def layers(self) -> Sequence[nn.Module]:
        return list(self.model.layers)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def run_layers(self, hidden_states: Tensor, positions: Tensor, first: int, end: int) -> Tensor:
        return self.model.run_layers(hidden_states, positions, first, end)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.lm_head(hidden_states)
