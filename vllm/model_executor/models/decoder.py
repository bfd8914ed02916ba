"""The decoder that Llama, GPT and many others share, with the differences as options.

Layers of attention and an MLP between embeddings and an output head. A family defines options, and
its own `Layer` class if norms and residuals are at other positions. Independent of devices, KV
caches, prefill or decode, and checkpoint files.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.attention import Attention, text_positions
from vllm.attention.backends.alibi import alibi_slopes
from vllm.config import ModelArch, RopeConfig
from vllm.distributed import TPGroup, divide
from vllm.errors import ConfigError
from vllm.model_executor.layers.activation import get_activation, get_gated_activation
from vllm.model_executor.layers.embedding import (
    LearnedPositionalEmbedding,
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.norm import HeadLayerNorm, LayerNorm, RMSNorm
from vllm.model_executor.layers.rotary import RotaryEmbedding
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors, Slice, SlicedModule
from vllm.model_executor.models.fused_weights import FusedLayers, split_joined_experts, split_parts
from vllm.model_executor.models.interface import CausalLM
from vllm.ops import get_ops
from vllm.ops.attention_options import PLAIN_ATTENTION, AttentionOptions

NormFactory = Callable[[ModelArch, int], nn.Module]
"""(model, size of the last dimension) -> a norm."""


def rms_norm(arch: ModelArch, size: int) -> RMSNorm:
    """Make the RMS norm of Llama."""
    return RMSNorm(size, arch.norm_eps)


def rms_norm_from_one(arch: ModelArch, size: int) -> RMSNorm:
    """Make the RMS norm of Qwen3-Next, whose checkpoints store the weights minus 1."""
    return RMSNorm(size, arch.norm_eps, offset=1)


def layer_norm(arch: ModelArch, size: int) -> LayerNorm:
    """Make the layer norm of GPT."""
    return LayerNorm(size, arch.norm_eps)


def layer_norm_without_bias(arch: ModelArch, size: int) -> LayerNorm:
    """Make a layer norm with weights and without bias."""
    return LayerNorm(size, arch.norm_eps, has_bias=False)


@dataclass(frozen=True)
class QueryTemperature:
    """Makes attention sharper in longer texts, by a factor on queries that depends on the position.

    The factor is 1 + scale * log(1 + floor((position + offset) / step)) (arXiv 2501.19399).
    """

    scale: float
    step: float
    offset: int = 0

    def factors(self, num_positions: int) -> Tensor:
        """Return the factor of each position: [num_positions, 1]."""
        position = torch.arange(num_positions, dtype=torch.float32, device="cpu") + self.offset
        factors = torch.log1p(torch.floor(position / self.step)) * self.scale + 1.0
        return factors.to(torch.get_default_dtype())[:, None]


@dataclass(frozen=True, kw_only=True)
class DecoderOptions:
    """The options in which decoder families differ."""

    norm: NormFactory = rms_norm
    """Norm of the hidden states."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the projection after attention."""
    mlp_bias: bool = False
    is_gated: bool = True
    """act(gate(x)) * up(x) in the MLP; False: act(up(x))."""
    qkv_limit: float | None = None
    """Elements of query, key and value are limited to this and its negative, after head norms."""
    head_norm: NormFactory | None = None
    """Norm of every query and key head before the rotation."""
    has_norm_per_head: bool = False
    """Whether queries and keys have a layer norm with weights of its own for each head."""
    norms_rotated_heads: bool = False
    """Head norms come after the rotation."""
    temperature: QueryTemperature | None = None
    """Factor of the queries by their position; None: there is none."""
    attention: AttentionOptions = PLAIN_ATTENTION
    """Attention options of all layers, except their windows."""
    has_output_gate: bool = False
    """The output of attention is multiplied with the sigmoid of `gate_proj`."""
    has_sinks: bool = False
    """Each head has a learned score, `sinks`, of one more key without a value."""
    alibi_scale: float = 0.0
    """Multiplies the slopes of ALiBi; 0: there are none."""
    is_neox: bool = True
    """Rotations pair the halves of a head; False: neighbouring elements (GPT-J)."""
    num_learned_positions: int = 0
    """Rows of a table of positions that is added to the embeddings."""
    needs_positions: bool = True
    """False: states tell the order of tokens, so that attention, if any, may have no positions."""
    has_embedding_norm: bool = False
    table_scale: float = 1.0
    """Factor on the embeddings of tokens, but not on embeddings that replace them."""
    embedding_scale: float = 1.0
    """Factor on all embeddings, including the ones that replace tokens."""
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None


def llama_options(arch: ModelArch) -> DecoderOptions:
    """Return decoder options with the biases that config.json sets with Llama's keys."""
    has_attention_bias = arch.config_flag("attention_bias")
    return DecoderOptions(
        qkv_bias=has_attention_bias,
        output_bias=has_attention_bias,
        mlp_bias=arch.config_flag("mlp_bias"),
    )


class DecoderAttention(SlicedModule):
    """Grouped-query attention with rotary positions.

    Shape: positions [T], hidden_states [T, input_size or hidden] -> [T, hidden]
    """

    temperatures: Tensor | None
    """[positions, 1]: factor on the query of each position."""

    def __init__(
        self,
        arch: ModelArch,
        options: DecoderOptions,
        window: int | None,
        rotary_emb: RotaryEmbedding | None,
        tp: TPGroup,
        input_size: int | None = None,
    ) -> None:
        super().__init__()
        self.head_size = arch.head_size
        self.qkv_limit = options.qkv_limit
        q_size = arch.num_heads * arch.head_size
        kv_size = arch.num_kv_heads * arch.head_size
        replicas = max(1, tp.size // arch.num_kv_heads)
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        if options.has_output_gate:
            parts["gate_proj"] = q_size
        self.qkv_proj = ColumnParallelLinear(
            input_size or arch.hidden_size,
            parts,
            tp,
            num_replicas={"k_proj": replicas, "v_proj": replicas},
            bias=options.qkv_bias,
        )
        self.o_proj = RowParallelLinear(q_size, arch.hidden_size, tp, bias=options.output_bias)
        head_norm = options.head_norm
        self.q_norm = None if head_norm is None else head_norm(arch, arch.head_size)
        self.k_norm = None if head_norm is None else head_norm(arch, arch.head_size)
        if options.has_norm_per_head:
            sizes = (arch.head_size, arch.norm_eps, tp)
            self.q_norm = HeadLayerNorm(arch.num_heads, *sizes)
            self.k_norm = HeadLayerNorm(arch.num_kv_heads, *sizes, num_replicas=replicas)
        self.norms_rotated_heads = options.norms_rotated_heads
        self.rotary_emb = rotary_emb
        temperatures = None
        if options.temperature is not None:
            temperatures = options.temperature.factors(arch.derived_max_model_len)
        self.register_buffer("temperatures", temperatures, persistent=False)
        num_heads = divide(arch.num_heads, tp.size)
        self.register_parameter("sinks", None)
        if options.has_sinks:
            self.sinks = nn.Parameter(
                torch.empty(num_heads, dtype=torch.float32), requires_grad=False
            )
            self.slices["sinks"] = {"": Slice(0, 0, num_heads, arch.num_heads)}
        slopes = None
        if options.alibi_scale:
            first = tp.rank * num_heads
            slopes = alibi_slopes(arch.num_heads)[first : first + num_heads] * options.alibi_scale
        self.attn = Attention(
            num_heads,
            arch.head_size,
            divide(arch.num_kv_heads * replicas, tp.size),
            replace(options.attention, sliding_window=window),
            alibi_slopes=slopes,
            sinks=self.sinks,
        )

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        q, k, v, *gate = self.project(hidden_states)
        if not self.norms_rotated_heads:
            q, k = self.normed(q, k)
        if self.qkv_limit is not None:
            q, k, v = (part.clamp(-self.qkv_limit, self.qkv_limit) for part in (q, k, v))
        if self.rotary_emb is not None:
            q, k = self.rotary_emb(positions, q, k)
        if self.norms_rotated_heads:
            q, k = self.normed(q, k)
        q = self.tempered(q, positions)
        attended = self.attn(q, k, v)
        if gate:
            attended = attended * gate[0].sigmoid()
        return self.o_proj(attended.flatten(1))

    def project(self, hidden_states: Tensor) -> list[Tensor]:
        """Project to query, key, value and, if the model has one, the gate: [T, heads, head_size]
        each.
        """
        packed = self.qkv_proj(hidden_states).split(self.qkv_proj.split_sizes, dim=-1)
        return [part.unflatten(-1, (-1, self.head_size)) for part in packed]

    def normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Normalize query and key before they are rotated, if the model has norms of heads."""
        if self.q_norm is None or self.k_norm is None:
            return query, key
        return self.q_norm(query), self.k_norm(key)

    def tempered(self, query: Tensor, positions: Tensor) -> Tensor:
        """Multiply the query by the factor of its position, if the model has such factors."""
        if self.temperatures is None:
            return query
        factor = F.embedding(text_positions(positions), self.temperatures)
        return get_ops().scale_rows(query, factor)


class GatedMLP(nn.Module):
    """Computes down(act(gate(x)) * up(x)) (SwiGLU and GEGLU, Shazeer 2020, arXiv 2002.05202).

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


class PlainMLP(nn.Module):
    """Computes down(act(up(x))).

    Shape: [T, hidden] -> [T, hidden]
    """

    def __init__(self, arch: ModelArch, bias: bool, tp: TPGroup) -> None:
        super().__init__()
        size = arch.intermediate_size
        self.up_proj = ColumnParallelLinear(arch.hidden_size, {"": size}, tp, bias=bias)
        self.act = get_activation(arch.hidden_act)
        self.down_proj = RowParallelLinear(size, arch.hidden_size, tp, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.up_proj(x)))


@dataclass(frozen=True)
class LayerSpec:
    """Parameters for building a decoder layer.

    Args:
        arch: architecture of the model.
        options: options of the family.
        index: index of the layer.
        rotary_emb: rotary embedding of the layer; None: it has no rotary embedding.
        tp: the ranks that share it.
        source: the earlier layer whose keys and values it reads; None: it has its own.
    """

    arch: ModelArch
    options: DecoderOptions
    index: int
    rotary_emb: RotaryEmbedding | None
    tp: TPGroup
    source: Any = None

    @property
    def window(self) -> int | None:
        """Size of the sliding window in tokens, the current token included; None: no window.

        Extra layers after the last one of the model have no window.
        """
        windows = self.arch.layer_windows
        return windows[self.index] if self.index < len(windows) else None

    def new_norm(self) -> nn.Module:
        """Make a norm over hidden states."""
        return self.options.norm(self.arch, self.arch.hidden_size)


LayerFactory = Callable[[LayerSpec], nn.Module]
"""Makes a layer, whose `forward` has the arguments and results of `Layer.forward`."""


class Layer(nn.Module, ABC):
    """One layer of a decoder. Subclasses define the positions of norms and residuals.

    The norm at the start of the next layer may do the residual addition at the end of this one, in
    one pass. So a layer takes and returns two tensors: the output of the last block, and the
    residual to which it is still to be added (None: nothing is to be added).
    """

    attention_type: ClassVar[type[nn.Module]] = DecoderAttention

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.arch = spec.arch
        self.input_layernorm = spec.new_norm()
        self.self_attn = self.make_attention(spec)
        self.mlp = self.make_mlp(spec)

    def make_attention(self, spec: LayerSpec) -> nn.Module:
        """Make the attention: positions [T], hidden_states [T, hidden] -> [T, hidden]."""
        return self.attention_type(spec.arch, spec.options, spec.window, spec.rotary_emb, spec.tp)

    def make_mlp(self, spec: LayerSpec) -> nn.Module:
        """Make the MLP: [T, hidden] -> [T, hidden]."""
        mlp = GatedMLP if spec.options.is_gated else PlainMLP
        return mlp(spec.arch, spec.options.mlp_bias, spec.tp)

    @abstractmethod
    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]: ...


class DecoderLayer(Layer):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.post_attention_layernorm = spec.new_norm()

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        normed, residual = add_norm(self.input_layernorm, hidden_states, residual)
        attended = self.self_attn(positions, normed)
        normed, residual = add_norm(self.post_attention_layernorm, attended, residual)
        return self.mlp(normed), residual


class PrePostNormLayer(Layer):
    """A layer with norms before and after attention, and before and after the MLP, as in
    Gemma 2.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.post_attention_layernorm = spec.new_norm()
        self.pre_feedforward_layernorm = spec.new_norm()
        self.post_feedforward_layernorm = spec.new_norm()

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        normed, residual = add_norm(self.input_layernorm, hidden_states, residual)
        attended = self.post_attention_layernorm(self.self_attn(positions, normed))
        normed, residual = add_norm(self.pre_feedforward_layernorm, attended, residual)
        return self.post_feedforward_layernorm(self.mlp(normed)), residual


class ParallelLayer(Layer):
    """Parallel attention and MLP: x + attention(norm(x)) + mlp(norm(x)), as in GPT-J.

    The sum is computed from left to right: if both outputs were added first, the error in bf16
    would be up to 3 % larger. With `num_norms` 2 the MLP has its own norm, as in GPT-NeoX.
    """

    num_norms: ClassVar[int] = 1

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.post_attention_layernorm = spec.new_norm() if self.num_norms == 2 else None

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        x = hidden_states
        normed = self.input_layernorm(x)
        if self.post_attention_layernorm is None:
            for_mlp = normed
        else:
            for_mlp = self.post_attention_layernorm(x)
        return x + self.self_attn(positions, normed) + self.mlp(for_mlp), None


class ParallelLayerOfTwoNorms(ParallelLayer):
    """A `ParallelLayer` whose MLP has its own norm."""

    num_norms = 2


def add_norm(
    norm: nn.Module, hidden_states: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Add the residual, and return the sum normed and the sum; in one pass if the norm
    supports it.
    """
    if residual is None:
        return norm(hidden_states), hidden_states
    if isinstance(norm, RMSNorm):
        return norm(hidden_states, residual)
    residual = residual + hidden_states
    return norm(residual), residual


class Decoder(nn.Module):
    """The token embedding, the layers and the final norm of a model.

    In checkpoints the names of these parts usually begin with `model.`.
    """

    def __init__(
        self, arch: ModelArch, options: DecoderOptions, make_layer: LayerFactory, tp: TPGroup
    ) -> None:
        super().__init__()
        self.options = options
        size = arch.hidden_size
        self.embedding_scale = options.embedding_scale
        self.embed_tokens = VocabParallelEmbedding(
            arch.num_embeddings, size, tp, scale=options.table_scale
        )
        self.embed_positions = (
            LearnedPositionalEmbedding(options.num_learned_positions, size)
            if options.num_learned_positions
            else None
        )
        self.embed_norm = options.norm(arch, size) if options.has_embedding_norm else None
        has_positions = arch.rope or self.embed_positions or options.alibi_scale
        if options.needs_positions and not has_positions:
            raise ConfigError(f"{arch.architecture} needs rope_theta in config.json")
        rotations: list[tuple[RopeConfig | None, RotaryEmbedding | None]] = [(None, None)]
        self.layers = nn.ModuleList()
        for index, rope in enumerate(arch.layer_ropes):
            rotary_emb = next((module for known, module in rotations if known == rope), None)
            if rope is not None and rotary_emb is None:
                rotary_emb = RotaryEmbedding(rope, arch.derived_max_model_len, options.is_neox)
                rotations.append((rope, rotary_emb))
            source = arch.kv_sources[index]
            spec = LayerSpec(
                arch.of_layer(index),
                options,
                index,
                rotary_emb,
                tp,
                None if source is None else self.layers[source],
            )
            self.layers.append(make_layer(spec))
        self.norm = options.norm(arch, size)
        self.is_one_stage = arch.is_one_stage

    def check_whole(self, first: int, end: int) -> None:
        """Check that the layers [first, end) can run without the others.

        Raises:
            ConfigError: the layers of this model depend on others, and not all are to run.
        """
        if self.is_one_stage and (first, end) != (0, len(self.layers)):
            raise ConfigError(
                "the layers of this model cannot be divided into stages: later layers also read "
                "outputs of earlier layers, the embeddings, or a table indexed by token id. Leave "
                "out the setting that divides them (such as pipeline_parallel_size)"
            )

    def run_layers(self, hidden_states: Tensor, positions: Tensor, first: int, end: int) -> Tensor:
        """Run consecutive layers; see `CausalLM.run_layers`.

        The hidden states between two calls are the sum of output and residual. No precision is
        lost: the next norm would round this sum to the same dtype anyway.
        """
        if first == 0:
            hidden_states = self._embedded(hidden_states, positions)
        residual: Tensor | None = None
        for index in range(first, end):
            hidden_states, residual = self.layers[index](positions, hidden_states, residual)
        if end < len(self.layers):
            return hidden_states if residual is None else hidden_states + residual
        return add_norm(self.norm, hidden_states, residual)[0]

    def _embedded(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        return x if self.embed_norm is None else self.embed_norm(x)


class DecoderForCausalLM(CausalLM):
    """A `Decoder` with an output head. Families are subclasses that set its options."""

    decoder_type: ClassVar[type[Decoder]] = Decoder
    layer_type: ClassVar[type[nn.Module]] = DecoderLayer
    fused_layers: ClassVar[FusedLayers] = {}
    """Layers that the checkpoint stores fused, and the layers into which `convert` splits them."""
    model: Any

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp)
        options = self.options(arch)
        self.logit_scale, self.logit_soft_cap = options.logit_scale, options.logit_soft_cap
        self.model = self.decoder_type(arch, options, self.make_layer, tp)
        self.lm_head = ParallelLMHead(
            arch.vocab_size, arch.hidden_size, tp, has_bias=options.head_bias
        )
        if arch.tie_word_embeddings:
            self.lm_head.tie(self.model.embed_tokens)

    def options(self, arch: ModelArch) -> DecoderOptions:
        """Return the options of the family. The default is `llama_options`.

        Raises:
            ConfigError: config.json has a setting that the family does not support.
        """
        return llama_options(arch)

    def make_layer(self, spec: LayerSpec) -> nn.Module:
        """Make a layer. Families whose config.json chooses the class of layers override this."""
        return self.layer_type(spec)

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        for fused, parts_of in self.fused_layers.items():
            if f".{fused}." in name:
                return split_parts(name, source, fused, parts_of(self.arch))
        return split_joined_experts(name, source)

    @property
    def layers(self) -> Sequence[nn.Module]:
        return list(self.model.layers)

    def modules_around_layers(self) -> tuple[list[nn.Module], list[nn.Module]]:
        model = self.model
        first = [model.embed_tokens, model.embed_positions, model.embed_norm]
        last = [model.norm, getattr(self, "lm_head", None)]  # a pooling model has no output head
        return (
            [module for module in first if module is not None],
            [module for module in last if module is not None],
        )

    @property
    def embedding(self) -> VocabParallelEmbedding:
        return self.model.embed_tokens

    def run_layers(self, hidden_states: Tensor, positions: Tensor, first: int, end: int) -> Tensor:
        return self.model.run_layers(hidden_states, positions, first, end)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits = self.lm_head(hidden_states)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_soft_cap is not None:
            logits = get_ops().soft_cap(logits, self.logit_soft_cap)
        return logits
