"""Decoders that have Mamba-2 mixers in most layers and attention in some: Bamba and Granite 4."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from torch import nn

from vllm.config import ModelArch
from vllm.model_executor.layers.mamba import Mamba2Mixer
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderLayer,
    DecoderOptions,
    GatedMLP,
    Layer,
    LayerSpec,
)
from vllm.model_executor.models.fused_weights import split_features
from vllm.model_executor.models.granite import GraniteLayer, granite_options
from vllm.model_executor.models.mamba import hybrid_sizes, split_mixer
from vllm.model_executor.models.mixture import Mixture, mixture_options, split_experts


class _MixerOrAttention(Layer):
    """A layer that has a Mamba-2 mixer if config.json says so, else attention."""

    def make_attention(self, spec: LayerSpec) -> nn.Module:
        if spec.arch.state_layers[spec.index]:
            return Mamba2Mixer(hybrid_sizes(spec.arch), spec.tp)
        return super().make_attention(spec)


class BambaLayer(_MixerOrAttention, DecoderLayer):
    """A `DecoderLayer` with a Mamba-2 mixer or attention."""


class BambaForCausalLM(DecoderForCausalLM):
    """Bamba 9B (IBM, Princeton, CMU and UIUC 2024)."""

    layer_type = BambaLayer
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        ".mamba.": ".self_attn.",
        ".feed_forward.": ".mlp.",
        ".pre_ff_layernorm.": ".post_attention_layernorm.",
        "model.final_layernorm.": "model.norm.",
    }

    def options(self, arch: ModelArch) -> DecoderOptions:
        return replace(super().options(arch), needs_positions=False)

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Split the fused tensors of Mamba-2 mixers."""
        return split_mixer(name, source, hybrid_sizes(self.arch))


class GraniteHybridLayer(_MixerOrAttention, GraniteLayer):
    """A `GraniteLayer` with a mixer or attention, and with an MLP, a `Mixture` of experts,
    or both.
    """

    def make_mlp(self, spec: LayerSpec) -> nn.Module:
        size = spec.arch.config_size("shared_intermediate_size")
        if not _has_experts(spec.arch):
            return GatedMLP(
                replace(spec.arch, intermediate_size=size), spec.options.mlp_bias, spec.tp
            )
        mixture = replace(mixture_options(spec.arch), shared_size=size, has_shared_gate=False)
        return Mixture(spec.arch, mixture, spec.tp)


class GraniteMoeHybridForCausalLM(DecoderForCausalLM):
    """Granite 4 (IBM 2025): H-Small, H-Tiny and H-Micro, and the dense Micro without mixers."""

    layer_type = GraniteHybridLayer
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        ".mamba.": ".self_attn.",
        ".block_sparse_moe.": ".mlp.",
        ".router.layer.": ".gate.",
        ".mlp.router.": ".mlp.gate.",  # name in transformers 5
    }

    def options(self, arch: ModelArch) -> DecoderOptions:
        return replace(granite_options(arch), needs_positions=False)

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Split the fused tensors of mixers, experts and the MLP."""
        shared = ".mlp.shared_expert." if _has_experts(self.arch) else ".mlp."
        name = name.replace(".shared_mlp.output_linear.", f"{shared}down_proj.")
        if ".shared_mlp.input_linear." in name:
            size = self.arch.config_size("shared_intermediate_size")
            parts = {f"{shared}gate_proj": size, f"{shared}up_proj": size}
            return split_features(name, source, ".shared_mlp.input_linear", parts)
        if ".mlp." in name:
            return split_experts(self.arch, name, source)
        return split_mixer(name, source, hybrid_sizes(self.arch))


def _has_experts(arch: ModelArch) -> bool:
    return arch.config_count("num_local_experts") > 0
