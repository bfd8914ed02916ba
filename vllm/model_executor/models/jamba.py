"""Jamba: decoders with Mamba mixers in most layers, attention in some, and experts in some."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from torch import nn

from vllm.config import ModelArch
from vllm.model_executor.layers.mamba import MambaMixer, MambaSizes
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderLayer,
    DecoderOptions,
    LayerSpec,
)
from vllm.model_executor.models.fused_weights import FusedLayers, FusedParts
from vllm.model_executor.models.mixture import Mixture, mixture_options


class JambaLayer(DecoderLayer):
    """A `DecoderLayer` with a Mamba mixer or attention, and with experts or an MLP."""

    def make_attention(self, spec: LayerSpec) -> nn.Module:
        if spec.arch.state_layers[spec.index]:
            return MambaMixer(_sizes(spec.arch), spec.tp)
        return super().make_attention(spec)

    def make_mlp(self, spec: LayerSpec) -> nn.Module:
        arch = spec.arch
        period, first = arch.config_size("expert_layer_period"), "expert_layer_offset"
        options = replace(mixture_options(arch), routing="softmax")
        if options.num_experts <= 1 or spec.index % period != arch.hf_config.get(first):
            return super().make_mlp(spec)
        return Mixture(arch, options, spec.tp)


class JambaForCausalLM(DecoderForCausalLM):
    """Jamba 1 to 1.7, and Jamba Reasoning (AI21 2024, arXiv 2403.19887)."""

    layer_type = JambaLayer
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        ".mamba.": ".self_attn.",
        ".feed_forward.": ".mlp.",
        ".mlp.router.": ".mlp.gate.",
        ".pre_ff_layernorm.": ".post_attention_layernorm.",
        "model.final_layernorm.": "model.norm.",
    }
    fused_layers: ClassVar[FusedLayers] = {
        "in_proj": lambda arch: FusedParts(_sizes(arch).in_parts)
    }

    def options(self, arch: ModelArch) -> DecoderOptions:
        return DecoderOptions(needs_positions=False)


def _sizes(arch: ModelArch) -> MambaSizes:
    """Return the dimensions of the mixers."""
    _config, rank = arch.hf_config, arch.hf_config.get("mamba_dt_rank", "auto")
    return MambaSizes(
        hidden_size=arch.hidden_size,
        inner_size=arch.hidden_size * arch.config_size("mamba_expand"),
        state_size=arch.config_size("mamba_d_state"),
        rank=-(-arch.hidden_size // 16) if rank == "auto" else arch.config_size("mamba_dt_rank"),
        kernel=arch.config_size("mamba_d_conv"),
        has_bias=arch.config_flag("mamba_proj_bias"),
        has_conv_bias=arch.config_flag("mamba_conv_bias", True),
        activation=arch.hidden_act,
        norm_eps=arch.norm_eps,
    )
