"""Decoders with grouped-query attention, and experts that are chosen as in DeepSeek.

GLM 4.5, dots, MiniMax M2, ERNIE 4.5, Hunyuan, Ling and the first DeepSeek MoE.
"""

from dataclasses import replace
from typing import ClassVar

from torch import nn

from vllm.config import ModelArch
from vllm.errors import ConfigError
from vllm.model_executor.layers.grouped_router import Routing
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import DecoderOptions, LayerSpec, rms_norm
from vllm.model_executor.models.deepseek import (
    DeepseekMixture,
    RoutedForCausalLM,
    RoutedLayer,
    deepseek_routing,
    expert_groups,
    is_behind_first_layers,
)
from vllm.model_executor.models.fused_weights import NUMBERED_MATRICES, FusedLayers, qkv_parts
from vllm.model_executor.models.llama import hunyuan_options
from vllm.model_executor.models.olmo import Olmo2Attention
from vllm.ops.expert_options import RoutingOptions


class BalancedLayer(RoutedLayer):
    """A `RoutedLayer` whose experts have biases to balance their load, as in DeepSeek V3."""

    default_method = "noaux_tc"


class Glm4MoeForCausalLM(RoutedForCausalLM):
    """GLM-4.5, 4.5-Air, 4.6 and 4.7 (Z.ai 2025, arXiv 2508.06471)."""

    layer_type = BalancedLayer

    def options(self, arch: ModelArch) -> DecoderOptions:
        return DecoderOptions(
            qkv_bias=arch.config_flag("attention_bias"),
            head_norm=rms_norm if arch.config_flag("use_qk_norm") else None,
        )


class SolarOpenForCausalLM(Glm4MoeForCausalLM):
    """Solar Open 100B (Upstage 2025): a GLM-4.5 in which all layers have experts."""


class Dots1Layer(RoutedLayer):
    """A `RoutedLayer` that always uses the router of DeepSeek V3, whatever name the config has for
    it.
    """

    def routing(self, arch: ModelArch) -> Routing:
        config = {**arch.hf_config, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        return deepseek_routing(replace(arch, hf_config=config))


class Dots1ForCausalLM(RoutedForCausalLM):
    """dots.llm1 (rednote-hilab 2025, arXiv 2506.05767)."""

    layer_type = Dots1Layer

    def options(self, arch: ModelArch) -> DecoderOptions:
        return replace(super().options(arch), mlp_bias=False, head_norm=rms_norm)


class MiniMaxM2Layer(RoutedLayer):
    """A layer of experts, with query and key normed over all heads together."""

    attention_type = Olmo2Attention

    def has_experts(self, spec: LayerSpec) -> bool:
        return True

    def make_mixture(self, spec: LayerSpec) -> nn.Module:
        arch = spec.arch
        options = RoutingOptions(
            top_k=arch.config_size("num_experts_per_tok"), weights="sigmoid_of_chosen"
        )
        routing = Routing(arch.config_size("num_local_experts"), options, has_bias=True)
        return DeepseekMixture(arch, routing, arch.intermediate_size, 0, spec.tp)


class MiniMaxM2ForCausalLM(RoutedForCausalLM):
    """MiniMax-M2, M2.5 and M2.7 (MiniMax 2025); half of each head has rotary positions."""

    layer_type = MiniMaxM2Layer
    checkpoint_names: ClassVar[dict[str, str]] = {
        ".block_sparse_moe.": ".mlp.",
        ".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
        **NUMBERED_MATRICES,
    }


class ErnieMoeLayer(RoutedLayer):
    """A layer that chooses experts by biased logits, and weights them by their part of the
    softmax.
    """

    def has_experts(self, spec: LayerSpec) -> bool:
        arch, index = spec.arch, spec.index
        first, step = arch.config_count("moe_layer_start_index"), "moe_layer_interval"
        last = arch.num_layers - 1
        if arch.hf_config.get("moe_layer_end_index") not in (None, -1):
            last = arch.config_count("moe_layer_end_index")
        return first <= index <= last and (index + 1) % (arch.config_count(step) or 1) == 0

    def make_mixture(self, spec: LayerSpec) -> nn.Module:
        arch = spec.arch
        options = RoutingOptions(top_k=arch.config_size("moe_k"), weights="softmax_of_chosen")
        routing = Routing(arch.config_size("moe_num_experts"), options, has_bias=True)
        size = arch.config_size("moe_intermediate_size")
        shared_size = size * arch.config_count("moe_num_shared_experts")
        return DeepseekMixture(arch, routing, size, shared_size, spec.tp, spec.options.mlp_bias)


class Ernie4_5_MoeForCausalLM(RoutedForCausalLM):
    """ERNIE 4.5 21B-A3B and 300B-A47B (Baidu 2025, "ERNIE 4.5 Technical Report")."""

    layer_type = ErnieMoeLayer
    checkpoint_names: ClassVar[dict[str, str]] = {
        ".mlp.moe_statics.": ".mlp.gate.",
        ".gate.moe_statics.": ".gate.",  # name in transformers 5
    }
    ignored_prefixes = ("model.mtp_",)
    """Layers that guess further tokens."""

    def options(self, arch: ModelArch) -> DecoderOptions:
        has_bias = arch.config_flag("use_bias")
        return DecoderOptions(
            is_neox=False,
            qkv_bias=has_bias,
            output_bias=has_bias,
            mlp_bias=has_bias,
            head_bias=has_bias,
        )

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Flatten the bias of the router, which is stored as [1, experts]."""
        if name.endswith(".e_score_correction_bias") and len(source.shape) == 2:
            return ((name, source.mapped(lambda bias: bias[0])),)
        return super().convert(name, source)


class HunYuanMoELayer(RoutedLayer):
    """A layer of experts, with a shared MLP that all tokens use."""

    def has_experts(self, spec: LayerSpec) -> bool:
        return True

    def make_mixture(self, spec: LayerSpec) -> nn.Module:
        arch = spec.arch
        top_k = arch.with_values_of_layer(spec.index, "moe_topk").config_size("moe_topk")
        options = RoutingOptions(top_k=top_k, weights="softmax_of_chosen")
        routing = Routing(arch.config_size("num_experts"), options)
        size = arch.intermediate_size
        return DeepseekMixture(arch, routing, size, size, spec.tp)


class HunYuanMoEV1ForCausalLM(RoutedForCausalLM):
    """Hunyuan-A13B (Tencent 2025); heads are normed after the rotary embedding."""

    options = staticmethod(hunyuan_options)
    layer_type = HunYuanMoELayer
    checkpoint_names: ClassVar[dict[str, str]] = {
        ".query_layernorm.": ".q_norm.",
        ".key_layernorm.": ".k_norm.",
        ".mlp.gate.wg.": ".mlp.gate.",
        ".mlp.shared_mlp.": ".mlp.shared_experts.",
    }


class DeepseekForCausalLM(RoutedForCausalLM):
    """DeepSeek-MoE 16B (DeepSeek-AI 2024, arXiv 2401.06066)."""

    layer_type = RoutedLayer


class BailingMoeLayer(RoutedLayer):
    """A `RoutedLayer` configured with the keys that Ling uses in config.json."""

    def has_experts(self, spec: LayerSpec) -> bool:
        return is_behind_first_layers(spec)

    def make_mixture(self, spec: LayerSpec) -> nn.Module:
        arch = spec.arch
        size = arch.config_size("moe_intermediate_size")
        shared_size = arch.config_count("moe_shared_expert_intermediate_size") or size
        shared_size *= arch.config_count("num_shared_experts")
        return DeepseekMixture(arch, self.routing(arch), size, shared_size, spec.tp)

    def routing(self, arch: ModelArch) -> Routing:
        is_normalized = arch.config_flag("norm_topk_prob", True)
        options = RoutingOptions(
            top_k=arch.config_size("num_experts_per_tok"),
            weights="softmax_of_chosen" if is_normalized else "softmax",
        )
        return Routing(arch.config_size("num_experts"), options)


class BailingMoeV2Layer(BailingMoeLayer):
    """A `BailingMoeLayer` with the router of DeepSeek V3."""

    def routing(self, arch: ModelArch) -> Routing:
        top_k = arch.config_size("num_experts_per_tok")
        options = RoutingOptions(
            top_k=top_k,
            weights="sigmoid_of_chosen" if top_k > 1 else "sigmoid",
            scale=arch.config_number("routed_scaling_factor"),
            groups=expert_groups(arch, "num_experts"),
        )
        return Routing(arch.config_size("num_experts"), options, has_bias=True)


class BailingMoeForCausalLM(RoutedForCausalLM):
    """Ling and Ring 1 and 1.5, Lite and Plus (Ling Team 2025, arXiv 2503.05139)."""

    layer_type = BailingMoeLayer
    checkpoint_names: ClassVar[dict[str, str]] = {
        "model.word_embeddings.": "model.embed_tokens.",
        ".attention.query_key_value.": ".self_attn.qkv_proj.",
        ".attention.dense.": ".self_attn.o_proj.",
        ".attention.query_layernorm.": ".self_attn.q_norm.",
        ".attention.key_layernorm.": ".self_attn.k_norm.",
        ".gate.expert_bias": ".gate.e_score_correction_bias",
    }
    fused_layers: ClassVar[FusedLayers] = {"qkv_proj": qkv_parts}

    def options(self, arch: ModelArch) -> DecoderOptions:
        if arch.config_flag("norm_head"):
            raise ConfigError(
                f"norm_head in config.json is not supported for {arch.architecture}: convert the "
                f"checkpoint to one with a normed output head, and set norm_head to false"
            )
        return DecoderOptions(
            qkv_bias=arch.config_flag("use_qkv_bias"),
            output_bias=arch.config_flag("use_bias"),
            head_norm=rms_norm if arch.config_flag("use_qk_norm") else None,
        )


class BailingMoeV2ForCausalLM(BailingMoeForCausalLM):
    """Ling and Ring 2.0, Mini, Flash and 1T (Ling Team 2025, arXiv 2510.22115)."""

    layer_type = BailingMoeV2Layer
