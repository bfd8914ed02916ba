"""Gemma 4, text only."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vllm.attention import Attention
from vllm.config import ModelArch
from vllm.distributed import TPGroup, divide
from vllm.errors import ConfigError
from vllm.model_executor.layers.activation import get_gated_activation
from vllm.model_executor.layers.embedding import VocabParallelEmbedding
from vllm.model_executor.layers.experts import Experts, Router
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear, whole_linear
from vllm.model_executor.layers.norm import RMSNorm
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import (
    Decoder,
    DecoderForCausalLM,
    DecoderOptions,
    Layer,
    LayerFactory,
    LayerSpec,
    add_norm,
)
from vllm.ops import get_ops
from vllm.ops.attention_options import AttentionOptions
from vllm.ops.expert_options import ExpertOptions

KeyAndValue = tuple[Tensor, Tensor]
"""Keys and values of the tokens of a forward pass, [T, G, D] each."""


class SharingAttention(nn.Module):
    """Attention with normed queries, keys and values.

    The last layers of a model may have only queries, and read the keys and values of an earlier
    layer.

    Shape: positions [T], hidden_states [T, hidden] -> [T, hidden]

    Args:
        spec: description of the layer.
        source: the attention of the earlier layer; None: the layer has its own keys and values.
        has_values: False: the projection of keys also gives values.
    """

    ones: Tensor
    """[head_size]: norms of values have no weights."""

    def __init__(
        self, spec: LayerSpec, source: "SharingAttention | None", has_values: bool = True
    ) -> None:
        super().__init__()
        arch, tp, bias = spec.arch, spec.tp, spec.options.qkv_bias
        self.head_size, self.norm_eps, self.rotary_emb = arch.head_size, arch.norm_eps, _rope(spec)
        q_size, kv_size = arch.num_heads * arch.head_size, arch.num_kv_heads * arch.head_size
        own = [] if source else ["k_proj", "v_proj"] if has_values else ["k_proj"]
        replicas = max(1, tp.size // arch.num_kv_heads)
        self.qkv_proj = ColumnParallelLinear(
            arch.hidden_size,
            {"q_proj": q_size, **dict.fromkeys(own, kv_size)},
            tp,
            num_replicas=dict.fromkeys(own, replicas),
            bias=bias,
        )
        self.o_proj = RowParallelLinear(q_size, arch.hidden_size, tp, bias=spec.options.output_bias)
        self.q_norm = RMSNorm(arch.head_size, arch.norm_eps)
        # In a tuple, so that it does not become a submodule.
        self._source = None if source is None else (source,)
        if source is None:
            self.k_norm = RMSNorm(arch.head_size, arch.norm_eps)
            self.attn = Attention(
                divide(arch.num_heads, tp.size),
                arch.head_size,
                divide(arch.num_kv_heads * replicas, tp.size),
                replace(spec.options.attention, sliding_window=spec.window),
            )
        self.register_buffer("ones", torch.ones(arch.head_size, device="cpu"), persistent=False)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, given: KeyAndValue | None
    ) -> tuple[Tensor, KeyAndValue]:
        """Compute the attention.

        Args:
            positions: [T]
            hidden_states: [T, hidden]
            given: keys and values of the earlier layer; None: the layer computes them.

        Returns:
            [T, hidden], and the keys and values that were used.
        """
        packed = self.qkv_proj(hidden_states).split(self.qkv_proj.split_sizes, dim=-1)
        query, *own = (part.unflatten(-1, (-1, self.head_size)) for part in packed)
        query = self.q_norm(query)
        is_own = given is None
        attn = self.attn if self._source is None else self._source[0].attn
        if given is None:
            value = get_ops().rms_norm(own[-1], self.ones, self.norm_eps)
            query, key = self.rotary_emb(positions, query, self.k_norm(own[0]))
            given = key, value
        else:
            query = self.rotary_emb.rotate_query(positions, query)
        return self.o_proj(attn(query, *given, stores=is_own).flatten(1)), given


def _rope(spec: LayerSpec) -> Any:
    if spec.rotary_emb is None:
        raise ConfigError(f"{spec.arch.architecture} needs rope_parameters in config.json")
    return spec.rotary_emb


class TokenFeatures(nn.Module):
    """Computes per-layer features of each token: a table entry plus a projection of the embedding.

    Each layer gets them in addition to the hidden states. L layers, P features for each.

    Shape: embeddings [T, hidden], table entries [T, L * P] -> L tensors [T, P]
    """

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__()
        size, count = arch.config_size("hidden_size_per_layer_input"), arch.num_layers
        self.sizes, self.hidden_size = (count, size), arch.hidden_size
        self.vocab_size = arch.vocab_size
        self.embed_tokens_per_layer = VocabParallelEmbedding(
            arch.config_size("vocab_size_per_layer_input"), count * size, tp
        )
        self.per_layer_model_projection = whole_linear(arch.hidden_size, count * size, tp)
        self.per_layer_projection_norm = RMSNorm(size, arch.norm_eps)

    def look_up(self, input_ids: Tensor) -> Tensor:
        """Look up the per-layer features of token ids [T].

        Ids beyond the table get its first entry.
        """
        table = self.embed_tokens_per_layer
        if table.num_embeddings < self.vocab_size:
            input_ids = torch.where(input_ids < table.num_embeddings, input_ids, 0)
        return self.embed_tokens_per_layer.look_up(input_ids) * self.sizes[1] ** 0.5

    def forward(self, embeddings: Tensor, rows: Tensor) -> Sequence[Tensor]:
        projected = self.per_layer_model_projection(embeddings) * self.hidden_size**-0.5
        normed = self.per_layer_projection_norm(projected.unflatten(-1, self.sizes)).flatten(1)
        count, size = self.sizes
        return ((normed + rows) * 0.5**0.5).split([size] * count, dim=-1)


class FeatureGate(nn.Module):
    """Adds gated features of each token to the hidden states.

    P features.

    Shape: hidden_states [T, hidden], features [T, P] -> [T, hidden]
    """

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__()
        size = arch.config_size("hidden_size_per_layer_input")
        self.per_layer_input_gate = whole_linear(arch.hidden_size, size, tp)
        self.act = get_gated_activation(arch.hidden_act)
        self.per_layer_projection = whole_linear(size, arch.hidden_size, tp)
        self.post_per_layer_input_norm = RMSNorm(arch.hidden_size, arch.norm_eps)

    def forward(self, hidden_states: Tensor, features: Tensor) -> Tensor:
        gate = self.per_layer_input_gate(hidden_states)
        gated = self.act(torch.cat((gate, features), dim=-1))
        return self.post_per_layer_input_norm(self.per_layer_projection(gated))


class ScaledRouter(nn.Module):
    """A router with normed and scaled inputs, and a learned factor on the weight of each expert.

    Shape: x [T, hidden] -> (ids [T, k] int64, weights [T, k] float32)
    """

    scale: nn.Parameter
    """[hidden]"""
    per_expert_scale: nn.Parameter
    """[num_experts] float32"""

    def __init__(self, arch: ModelArch) -> None:
        super().__init__()
        num_experts, top_k = (arch.config_size(name) for name in ("num_experts", "top_k_experts"))
        self.norm_eps, self.factor = arch.norm_eps, arch.hidden_size**-0.5
        self.proj = Router(arch.hidden_size, num_experts, top_k, "softmax_of_chosen")
        self.scale = nn.Parameter(torch.empty(arch.hidden_size), requires_grad=False)
        factors = torch.empty(num_experts, dtype=torch.float32)
        self.per_expert_scale = nn.Parameter(factors, requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scaled = get_ops().rms_norm(x, self.scale, self.norm_eps) * self.factor
        return self.proj.choose(scaled, self.per_expert_scale)


class ParallelMixture(nn.Module):
    """Experts that run in parallel to the MLP of a layer, with their norms and the MLP's last norm.

    Shape: hidden_states [T, hidden], result of the MLP [T, hidden] -> [T, hidden]
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        arch = spec.arch
        if arch.hidden_act != "gelu_pytorch_tanh":
            raise ConfigError(
                f"hidden_activation in config.json must be 'gelu_pytorch_tanh' for the experts of "
                f"{arch.architecture}, got {arch.hidden_act!r}"
            )
        self.router = ScaledRouter(arch)
        self.experts = Experts(
            arch.config_size("num_experts"),
            arch.hidden_size,
            arch.config_size("moe_intermediate_size"),
            spec.tp,
            ExpertOptions(is_gelu=True),
        )
        self.post_feedforward_layernorm_1 = spec.new_norm()
        self.pre_feedforward_layernorm_2 = spec.new_norm()
        self.post_feedforward_layernorm_2 = spec.new_norm()

    def forward(self, hidden_states: Tensor, of_mlp: Tensor) -> Tensor:
        normed = self.pre_feedforward_layernorm_2(hidden_states)
        mixed = self.experts(normed, *self.router(hidden_states))
        of_mlp = self.post_feedforward_layernorm_1(of_mlp)
        return of_mlp + self.post_feedforward_layernorm_2(mixed)


class Gemma4Layer(Layer):
    """A layer with norms before and after attention and MLP, and a learned factor at its end.

    It may also have experts parallel to the MLP, and per-layer features of tokens.
    """

    layer_scalar: nn.Parameter
    """[1]"""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.post_attention_layernorm = spec.new_norm()
        self.pre_feedforward_layernorm = spec.new_norm()
        self.post_feedforward_layernorm = spec.new_norm()
        self.layer_scalar = nn.Parameter(torch.ones(1), requires_grad=False)
        has_features = bool(spec.arch.hf_config.get("hidden_size_per_layer_input"))
        self.features = FeatureGate(spec.arch, spec.tp) if has_features else None
        has_experts = spec.arch.config_flag("enable_moe_block")
        self.mixture = ParallelMixture(spec) if has_experts else None

    def make_attention(self, spec: LayerSpec) -> nn.Module:
        has_values = not (spec.arch.config_flag("attention_k_eq_v") and spec.window is None)
        source = None if spec.source is None else spec.source.self_attn
        return SharingAttention(spec, source, has_values)

    def make_mlp(self, spec: LayerSpec) -> nn.Module:
        arch = spec.arch
        if spec.source is not None and arch.config_flag("use_double_wide_mlp"):
            arch = replace(arch, intermediate_size=2 * arch.intermediate_size)
        return super().make_mlp(replace(spec, arch=arch))

    def forward(  # type: ignore[override]
        self,
        positions: Tensor,
        hidden_states: Tensor,
        features: Tensor | None,
        given: KeyAndValue | None,
    ) -> tuple[Tensor, KeyAndValue]:
        """Run the layer.

        Args:
            positions: [T]
            hidden_states: [T, hidden]
            features: per-layer features of the tokens, [T, P]; None: the model has none.
            given: keys and values of an earlier layer; None: the layer computes them.

        Returns:
            [T, hidden], and the keys and values that were used.
        """
        x = hidden_states
        attended, given = self.self_attn(positions, self.input_layernorm(x), given)
        attended = self.post_attention_layernorm(attended)
        normed, x = add_norm(self.pre_feedforward_layernorm, attended, x)
        out = self.mlp(normed)
        if self.mixture is not None:
            out = self.mixture(x, out)
        x = x + self.post_feedforward_layernorm(out)
        if self.features is not None:
            x = x + self.features(x, features)
        return x * self.layer_scalar, given


class Gemma4Decoder(Decoder):
    """A `Decoder` whose layers may get per-layer features of tokens, and read earlier layers."""

    def __init__(
        self, arch: ModelArch, options: DecoderOptions, make_layer: LayerFactory, tp: TPGroup
    ) -> None:
        super().__init__(arch, options, make_layer, tp)
        self.kv_sources, self.hidden_size = arch.kv_sources, arch.hidden_size
        has_features = bool(arch.hf_config.get("hidden_size_per_layer_input"))
        self.features = TokenFeatures(arch, tp) if has_features else None

    def run_layers(self, hidden_states: Tensor, positions: Tensor, first: int, end: int) -> Tensor:
        """Run consecutive layers; see `CausalLM.run_layers`.

        Raises:
            ConfigError: not all layers are to run, and they depend on others.
        """
        self.check_whole(first, end)
        features: Sequence[Tensor | None] = [None] * len(self.layers)
        if self.features is not None:
            sizes = (self.hidden_size, hidden_states.shape[-1] - self.hidden_size)
            hidden_states, rows = hidden_states.split(sizes, dim=-1)
            hidden_states = hidden_states.contiguous()
            features = self.features(hidden_states, rows)
        hidden_states = self.before_layers(hidden_states)
        read: dict[int, KeyAndValue] = {}
        for index in range(first, end):
            source = self.kv_sources[index]
            given = None if source is None else read[source]
            hidden_states, read[index] = self.layers[index](
                positions, hidden_states, features[index], given
            )
        hidden_states = self.after_layers(hidden_states)
        return self.norm(hidden_states) if end == len(self.layers) else hidden_states

    def before_layers(self, hidden_states: Tensor) -> Tensor:
        """Convert embeddings [T, hidden] to the input of the first layer. Unchanged unless a
        subclass overrides it.
        """
        return hidden_states

    def after_layers(self, hidden_states: Tensor) -> Tensor:
        """Convert the output of the last layer to hidden states [T, hidden]. Unchanged unless a
        subclass overrides it.
        """
        return hidden_states


class Gemma4ForCausalLM(DecoderForCausalLM):
    """Gemma 4 (Google 2026). Layers with sliding windows and with full attention have heads of
    different sizes. It has per-layer features of tokens, layers that read the keys and values of
    earlier ones, and experts parallel to the MLP.
    """

    decoder_type = Gemma4Decoder
    layer_type: ClassVar[type[nn.Module]] = Gemma4Layer
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        **{
            f".{name}.": f".features.{name}."
            for name in (
                *("embed_tokens_per_layer", "per_layer_model_projection"),
                *("per_layer_projection_norm", "per_layer_input_gate"),
                *("per_layer_projection", "post_per_layer_input_norm"),
            )
        },
        **{
            f".{name}.": f".mixture.{name}."
            for name in (
                *("router", "experts", "post_feedforward_layernorm_1"),
                *("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"),
            )
        },
    }

    def options(self, arch: ModelArch) -> DecoderOptions:
        config = arch.hf_config
        if config.get("use_bidirectional_attention") == "all":
            raise ConfigError(
                "use_bidirectional_attention in config.json must be null or 'vision' for "
                f"{arch.architecture}, got 'all': text tokens must not attend to later tokens"
            )
        return replace(
            super().options(arch),
            attention=AttentionOptions(1.0),
            table_scale=arch.hidden_size**0.5,
            logit_soft_cap=config.get("final_logit_softcapping"),
        )

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings, concatenated with the per-layer features of the token
        ids, if any.
        """
        embedded = super().embed(input_ids)
        features = self.model.features
        if features is None:
            return embedded
        return torch.cat((embedded, features.look_up(input_ids)), dim=-1)

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Skip keys and values of layers that read the cache of another layer, and split tensors of
        experts.
        """
        found = _KEYS_AND_VALUES.match(name)
        if found and self.arch.kv_sources[int(found[1])] is not None:
            return ()
        return super().convert(name, source)


_KEYS_AND_VALUES = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.")
