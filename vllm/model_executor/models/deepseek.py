"""DeepSeek V2 and V3: latent attention, and many small experts plus shared ones."""

import re
from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from vllm.attention import LatentAttention
from vllm.config import ModelArch
from vllm.distributed import TPGroup, divide
from vllm.errors import ConfigError
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.grouped_router import GroupedRouter, Routing
from vllm.model_executor.layers.latent import LatentUpProjection
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear, whole_linear
from vllm.model_executor.layers.norm import RMSNorm
from vllm.model_executor.layers.rotary import RotaryEmbedding, yarn_sharpness
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderLayer,
    DecoderOptions,
    GatedMLP,
    LayerSpec,
)
from vllm.ops.expert_options import ONE_GROUP, ExpertGroups, RoutingOptions
from vllm.ops.expert_options import Routing as WeightsOfChosen

_LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of compressed vectors, whatever config.json contains for the other norms."""


class LatentScales(NamedTuple):
    """Factors on the compressed vectors of latent attention (LongCat-Flash, arXiv 2509.01322)."""

    query: float = 1.0
    """Factor of queries."""
    latent: float = 1.0
    """Factor of the latent vector of keys and values; rotated keys have none."""


_NO_SCALES = LatentScales()


class LatentSelfAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1).

    Keys and values of all heads are projections of one latent vector. The cache stores this vector,
    followed by one rotated key that all heads share (not rotated in models without positions).
    Queries may also be projected from a compressed vector.

    Shape: positions [T], hidden_states [T, hidden] -> [T, hidden]
    """

    def __init__(
        self,
        arch: ModelArch,
        rotary_emb: RotaryEmbedding | None,
        tp: TPGroup,
        scales: LatentScales = _NO_SCALES,
    ) -> None:
        super().__init__()
        config, hidden, num_heads = arch.hf_config, arch.hidden_size, arch.num_heads
        size = arch.config_size
        key_size, value_size = size("qk_nope_head_dim"), size("v_head_dim")
        latent_size, rotary_size = size("kv_lora_rank"), size("qk_rope_head_dim")
        has_bias = arch.config_flag("attention_bias")
        self.query_sizes = (key_size, rotary_size)
        self.latent_sizes = (latent_size, rotary_size)
        self.q_a_proj: ColumnParallelLinear | None = None
        query_size, query_rank = num_heads * sum(self.query_sizes), config.get("q_lora_rank")
        if query_rank is None:
            self.q_proj = ColumnParallelLinear(hidden, {"": query_size}, tp)
        else:
            self.q_a_proj = whole_linear(hidden, int(query_rank), tp, has_bias)
            self.q_a_layernorm = RMSNorm(int(query_rank), _LATENT_NORM_EPS)
            self.q_b_proj = ColumnParallelLinear(int(query_rank), {"": query_size}, tp)
        self.kv_a_proj_with_mqa = whole_linear(hidden, sum(self.latent_sizes), tp, has_bias)
        self.kv_a_layernorm = RMSNorm(latent_size, _LATENT_NORM_EPS)
        self.kv_b_proj = LatentUpProjection(latent_size, num_heads, key_size, value_size, tp)
        self.o_proj = RowParallelLinear(num_heads * value_size, hidden, tp, bias=has_bias)
        self.rotary_emb = rotary_emb
        self.latent_scale = scales.latent
        scale = _attention_scale(arch) * scales.query
        self.attn = LatentAttention(divide(num_heads, tp.size), latent_size, rotary_size, scale)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        query = self._project_query(hidden_states).unflatten(-1, (-1, sum(self.query_sizes)))
        query, rotated = query.split(self.query_sizes, dim=-1)
        latent, shared_key = self.kv_a_proj_with_mqa(hidden_states).split(self.latent_sizes, dim=-1)
        rotated, shared_key = rotated.contiguous(), shared_key.unsqueeze(1).contiguous()
        if self.rotary_emb is not None:
            rotated, shared_key = self.rotary_emb(positions, rotated, shared_key)
        query = self.kv_b_proj.absorb(query, rotated)
        latent = self.kv_a_layernorm(latent)
        if self.latent_scale != 1.0:
            latent = latent * self.latent_scale
        key = torch.cat((latent.unsqueeze(1), shared_key), dim=-1)
        attended = self.kv_b_proj.expand(self.attn(query, key))
        return self.o_proj(attended.flatten(1))

    def _project_query(self, hidden_states: Tensor) -> Tensor:
        if self.q_a_proj is None:
            return self.q_proj(hidden_states)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))


def latent_attention(spec: LayerSpec, scales: LatentScales = _NO_SCALES) -> LatentSelfAttention:
    """Make latent attention for a layer.

    Raises:
        ConfigError: the config has no rotary embedding.
    """
    if spec.rotary_emb is None:
        raise ConfigError(f"{spec.arch.architecture} needs rope_theta in config.json")
    return LatentSelfAttention(spec.arch, spec.rotary_emb, spec.tp, scales)


def _attention_scale(arch: ModelArch) -> float:
    """Return the factor on attention scores: 1 / sqrt(head size), times a YaRN factor if used.

    The YaRN factor is the square of the weight `mscale_all_dim`. Other families multiply the
    cosines and sines of queries and keys by it instead.
    """
    head_size = arch.config_size("qk_nope_head_dim") + arch.config_size("qk_rope_head_dim")
    scale = float(head_size) ** -0.5
    rope = arch.rope
    if rope is None or rope.rope_type == "default":
        return scale
    mscale = float(rope.scaling.get("mscale_all_dim") or 0.0)
    return scale * yarn_sharpness(float(rope.scaling.get("factor") or 1.0), mscale) ** 2


class DeepseekMixture(nn.Module):
    """Experts of which each token uses a few, and shared experts that all tokens use.

    Args:
        arch: architecture of the model.
        routing: rules by which tokens choose experts.
        size: intermediate size of an expert.
        shared_size: intermediate size of the shared experts together; 0: there are none.
        tp: the ranks that share them.
        has_bias: whether the shared experts have biases.

    Shape: [T, hidden] -> [T, hidden]
    """

    def __init__(
        self,
        arch: ModelArch,
        routing: Routing,
        size: int,
        shared_size: int,
        tp: TPGroup,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        self.gate = GroupedRouter(arch.hidden_size, routing)
        self.experts = Experts(routing.num_experts, arch.hidden_size, size, tp)
        self.shared_experts: GatedMLP | None = None
        if shared_size:
            shared = replace(arch, intermediate_size=shared_size)
            self.shared_experts = GatedMLP(shared, has_bias, tp)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.experts(x, *self.gate.choose(x))
        return out if self.shared_experts is None else out + self.shared_experts(x)


_WEIGHTS: dict[tuple[str, bool], WeightsOfChosen] = {
    ("softmax", False): "softmax",
    ("softmax", True): "softmax_of_chosen",
    ("sigmoid", False): "sigmoid",
    ("sigmoid", True): "sigmoid_of_chosen",
}
"""Score of an expert, and whether weights sum to 1 before they are scaled."""


def deepseek_routing(arch: ModelArch, default_method: str = "greedy") -> Routing:
    """Read the routing rules from config.json.

    Args:
        arch: architecture of the model.
        default_method: used if config.json has no topk_method.

    Raises:
        ConfigError: the method or the score is unknown, or the groups do not divide the experts.
    """
    config = arch.hf_config
    method = config.get("topk_method") or default_method
    if method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        raise ConfigError(
            f"topk_method {method!r} in config.json is not supported; supported: greedy, "
            f"group_limited_greedy, noaux_tc"
        )
    has_bias = method == "noaux_tc"
    score = config.get("scoring_func") or ("sigmoid" if has_bias else "softmax")
    if score not in ("softmax", "sigmoid"):
        raise ConfigError(
            f"scoring_func {score!r} in config.json is not supported; supported: softmax, sigmoid"
        )
    is_normalized = arch.config_flag("norm_topk_prob", has_bias)
    # DeepSeek V2 applies routed_scaling_factor only to weights that are not normalized.
    is_scaled = has_bias or not is_normalized
    options = RoutingOptions(
        top_k=arch.config_size("num_experts_per_tok"),
        weights=_WEIGHTS[score, is_normalized],
        scale=arch.config_number("routed_scaling_factor") if is_scaled else 1.0,
        groups=ONE_GROUP if method == "greedy" else expert_groups(arch, "n_routed_experts"),
    )
    return Routing(arch.config_size("n_routed_experts"), options, has_bias)


def expert_groups(arch: ModelArch, key: str) -> ExpertGroups:
    """Read the groups of experts from config.json.

    Args:
        arch: architecture of the model.
        key: the key in config.json with the number of experts.

    Raises:
        ConfigError: the groups do not divide the experts.
    """
    num_experts, num_groups = arch.config_size(key), arch.config_count("n_group") or 1
    if num_experts % num_groups:
        raise ConfigError(
            f"{key} ({num_experts}) in config.json must be a multiple of n_group ({num_groups}). "
            f"Correct the file"
        )
    return ExpertGroups(num_groups, min(num_groups, arch.config_count("topk_group") or 1))


class RoutedLayer(DecoderLayer):
    """A `DecoderLayer` with DeepSeek's experts; the first layers of the model have an MLP
    instead.
    """

    default_method: ClassVar[str] = "greedy"
    """Method by which tokens choose experts, if config.json has no topk_method."""

    def make_mlp(self, spec: LayerSpec) -> nn.Module:
        return self.make_mixture(spec) if self.has_experts(spec) else super().make_mlp(spec)

    def has_experts(self, spec: LayerSpec) -> bool:
        """Return whether the layer has experts according to config.json.

        Raises:
            ConfigError: the setting covers too few layers, or has an unknown format.
        """
        config, num_layers = spec.arch.hf_config, spec.arch.num_layers
        kinds = config.get("mlp_layer_types")
        if kinds and spec.index < num_layers:  # the list does not include the draft layers
            if len(kinds) < num_layers:
                raise ConfigError(
                    f"config.json: mlp_layer_types has {len(kinds)} entries; it must have "
                    f"num_hidden_layers ({num_layers}). Correct the file, or give another value "
                    "with hf_overrides"
                )
            return bool(kinds[spec.index] == "sparse")
        return config.get("n_routed_experts") is not None and is_behind_first_layers(spec)

    def make_mixture(self, spec: LayerSpec) -> nn.Module:
        """Make the experts: [T, hidden] -> [T, hidden]."""
        arch = spec.arch
        size = arch.config_size("moe_intermediate_size")
        shared_size = size * arch.config_count("n_shared_experts")
        return DeepseekMixture(arch, self.routing(arch), size, shared_size, spec.tp)

    def routing(self, arch: ModelArch) -> Routing:
        """Return the rules by which tokens choose experts."""
        return deepseek_routing(arch, self.default_method)


def is_behind_first_layers(spec: LayerSpec) -> bool:
    """Return whether the layer's index is one with experts.

    The first `first_k_dense_replace` layers have none, and of the others every `moe_layer_freq`th
    has experts.

    Raises:
        ConfigError: moe_layer_freq is not an integer.
    """
    config = spec.arch.hf_config
    first = spec.arch.config_count("first_k_dense_replace")
    step = config.get("moe_layer_freq") or 1
    if type(step) is not int:
        raise ConfigError(
            f"config.json: 'moe_layer_freq' must be an integer, or null, got {step!r}. Correct "
            "the file, or give another value with hf_overrides"
        )
    return spec.index >= first and spec.index % step == 0


class DeepseekLayer(RoutedLayer):
    """A `RoutedLayer` with latent attention."""

    def make_attention(self, spec: LayerSpec) -> nn.Module:
        return latent_attention(spec)


class DeepseekV3Layer(DeepseekLayer):
    """A `DeepseekLayer` whose experts have biases to balance their load."""

    default_method = "noaux_tc"


def deepseek_options(arch: ModelArch) -> DecoderOptions:
    """Return the decoder options, including which elements of a head are rotated together."""
    return DecoderOptions(is_neox=not arch.config_flag("rope_interleave", True))


class RoutedForCausalLM(DecoderForCausalLM):
    """A decoder of `RoutedLayer`s. Extra layers in the checkpoint predict draft tokens (multi-token
    prediction, `vllm.model_executor.speculators.mtp`); they are not loaded here.
    """

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        match = re.match(r"model\.layers\.(\d+)\.", name)
        if match and int(match[1]) >= self.arch.num_layers:
            return ()
        return super().convert(name, source)


class DeepseekV2ForCausalLM(RoutedForCausalLM):
    """DeepSeek-V2, V2-Lite, V2.5 and Coder-V2 (DeepSeek-AI 2024, arXiv 2405.04434)."""

    options = staticmethod(deepseek_options)
    layer_type = DeepseekLayer


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """DeepSeek-V3, V3.1 and R1 (DeepSeek-AI 2024, arXiv 2412.19437), and Kimi K2 (Moonshot AI 2025,
    arXiv 2507.20534)."""

    layer_type = DeepseekV3Layer


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek-V3.2 (DeepSeek-AI 2025, arXiv 2512.02556), with full instead of sparse attention.
    The original attends to all tokens only up to `index_topk` (2,048) tokens; in longer texts an
    indexer chooses tokens, so outputs differ.
    """

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Skip the weights of the indexer."""
        return () if ".self_attn.indexer." in name else super().convert(name, source)


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    """GLM-5 (Z.ai 2026), with full instead of sparse attention. The original uses the sparse
    attention of DeepSeek-V3.2 after `index_topk` (2,048) tokens, so outputs differ in longer texts.
    """


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM-4.7-Flash (Z.ai 2026): a small DeepSeek-V3."""


class YoutuForCausalLM(DeepseekV2ForCausalLM):
    """Youtu-LLM 2B (Tencent 2026): latent attention, without experts."""
