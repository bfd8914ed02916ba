"""Kimi Linear: Kimi Delta Attention in most layers, latent attention without positions in some.

Its experts are computed as in DeepSeek V3.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from vllm.config import ModelArch
from vllm.model_executor.layers.delta_net import DeltaNetSizes, KimiDeltaAttention
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import DecoderForCausalLM, DecoderOptions, LayerSpec
from vllm.model_executor.models.deepseek import LatentSelfAttention, RoutedLayer
from vllm.model_executor.models.fused_weights import NUMBERED_MATRICES, split_features

_DEEPSEEK_NAMES = {
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_expert_group": "n_group",
    "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob",
    "moe_router_activation_func": "scoring_func",
}
"""Key of config.json -> name of the same key in DeepSeek V3."""


def _in_words_of_deepseek(arch: ModelArch) -> ModelArch:
    config = dict(arch.hf_config)
    given = {ours: config[name] for name, ours in _DEEPSEEK_NAMES.items() if name in config}
    return replace(arch, hf_config=config | given)


def delta_attention_sizes(arch: ModelArch) -> DeltaNetSizes:
    """Read the dimensions of Kimi Delta Attention from config.json, as published or as transformers
    saves it.
    """
    given: Mapping[str, Any] = arch.hf_config.get("linear_attn_config") or {}
    numbers = {
        "linear_num_heads": given.get("num_heads"),
        "linear_head_dim": given.get("head_dim"),
        "linear_conv_kernel_dim": given.get("short_conv_kernel_size"),
    }
    known = {name: number for name, number in numbers.items() if number is not None}
    size = replace(arch, hf_config={**arch.hf_config, **known}).config_size
    return DeltaNetSizes(
        hidden_size=arch.hidden_size,
        num_key_heads=size("linear_num_heads"),
        num_value_heads=size("linear_num_heads"),
        key_size=size("linear_head_dim"),
        value_size=size("linear_head_dim"),
        kernel=size("linear_conv_kernel_dim"),
        norm_eps=arch.norm_eps,
        activation=arch.hidden_act,
    )


class KimiLinearLayer(RoutedLayer):
    """A `RoutedLayer` with Kimi Delta Attention or latent attention."""

    default_method = "noaux_tc"

    def make_attention(self, spec: LayerSpec) -> nn.Module:
        if spec.arch.state_layers[spec.index]:
            return KimiDeltaAttention(delta_attention_sizes(spec.arch), spec.tp)
        return LatentSelfAttention(spec.arch, spec.rotary_emb, spec.tp)

    def make_mlp(self, spec: LayerSpec) -> nn.Module:
        return super().make_mlp(replace(spec, arch=_in_words_of_deepseek(spec.arch)))


class KimiLinearForCausalLM(DecoderForCausalLM):
    """Kimi Linear 48B-A3B (Kimi Team 2025, arXiv 2510.26692)."""

    layer_type = KimiLinearLayer
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        ".block_sparse_moe.": ".mlp.",
        **NUMBERED_MATRICES,
        ".self_attn.forget_gate.": ".self_attn.",  # name in transformers 5
    }

    def options(self, arch: ModelArch) -> DecoderOptions:
        return DecoderOptions(needs_positions=False)

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Flatten the decay rates, stored as [1, 1, heads, 1], and split fused convolutions.

        transformers 5 saves convolutions fused.
        """
        if ".self_attn.conv1d." in name:
            queries, keys, values = delta_attention_sizes(self.arch).features
            parts = {"q_conv1d": queries, "k_conv1d": keys, "v_conv1d": values}
            return split_features(name, source, "conv1d", parts)
        if name.endswith(".A_log"):
            source = source.mapped(lambda x: x.flatten())
        return super().convert(name, source)
