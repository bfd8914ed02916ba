"""Decoders with Gated DeltaNet in most layers and gated attention in some.

Qwen3-Next, Qwen 3.5 and 3.6.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from torch import nn

from vllm.config import ModelArch
from vllm.model_executor.layers.delta_net import DeltaNetSizes, GatedDeltaNet
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderLayer,
    DecoderOptions,
    Layer,
    LayerSpec,
    rms_norm_from_one,
)
from vllm.model_executor.models.fused_weights import (
    split_features,
    split_groups,
    split_sizes_of_groups,
)
from vllm.model_executor.models.mixture import MixtureLayer


def delta_net_sizes(arch: ModelArch) -> DeltaNetSizes:
    """Read the dimensions of Gated DeltaNet from config.json."""
    return DeltaNetSizes(
        hidden_size=arch.hidden_size,
        num_key_heads=arch.config_size("linear_num_key_heads"),
        num_value_heads=arch.config_size("linear_num_value_heads"),
        key_size=arch.config_size("linear_key_head_dim"),
        value_size=arch.config_size("linear_value_head_dim"),
        kernel=arch.config_size("linear_conv_kernel_dim"),
        norm_eps=arch.norm_eps,
        activation=arch.hidden_act,
    )


class _DeltaNetOrAttention(Layer):
    """A layer that has Gated DeltaNet if config.json says so, else attention."""

    def make_attention(self, spec: LayerSpec) -> nn.Module:
        if spec.index < spec.arch.num_layers and spec.arch.state_layers[spec.index]:
            return GatedDeltaNet(delta_net_sizes(spec.arch), spec.tp)
        return super().make_attention(spec)


class DeltaNetLayer(_DeltaNetOrAttention, DecoderLayer):
    """A `DecoderLayer` with Gated DeltaNet or attention."""


class DeltaNetMixtureLayer(_DeltaNetOrAttention, MixtureLayer):
    """A `MixtureLayer` with Gated DeltaNet or attention."""


class Qwen3NextForCausalLM(DecoderForCausalLM):
    """Qwen3-Next 80B-A3B and Coder-Next (Qwen team 2025). Layers for multi-token prediction are
    loaded only by `vllm.model_executor.speculators.mtp`.
    """

    layer_type: ClassVar[type[nn.Module]] = DeltaNetMixtureLayer

    checkpoint_names: ClassVar[Mapping[str, str]] = {".linear_attn.": ".self_attn."}
    ignored_prefixes: ClassVar[tuple[str, ...]] = ("mtp.",)

    def options(self, arch: ModelArch) -> DecoderOptions:
        return replace(
            super().options(arch),
            norm=rms_norm_from_one,
            head_norm=rms_norm_from_one,
            has_output_gate=True,
            needs_positions=False,
        )

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Split fused tensors of attention, of DeltaNet and of experts."""
        # Q_proj contains, for each head, its query and then its gate.
        if ".self_attn.q_proj." in name:
            heads, size = {"q_proj": 1, "gate_proj": 1}, self.arch.head_size
            return split_groups(name, source, "q_proj", heads, size, self.arch.num_heads)
        return self.split_delta_net(name, source, delta_net_sizes(self.arch))

    def split_delta_net(
        self, name: str, source: CheckpointTensor, sizes: DeltaNetSizes
    ) -> NamedTensors:
        """Split a tensor of a fused DeltaNet layer; return other tensors unchanged."""
        if ".conv1d." in name:
            return split_features(name, source, "conv1d", sizes.mixed_parts("conv_"))
        groups, per_key = sizes.num_key_heads, sizes.heads_per_key
        if ".in_proj_qkvz." in name:
            values = per_key * sizes.value_size
            of_key = {"in_q": sizes.key_size, "in_k": sizes.key_size}
            parts = of_key | {"in_v": values, "in_proj_z": values}
            return split_sizes_of_groups(name, source, "in_proj_qkvz", parts, groups)
        if ".in_proj_ba." in name:
            parts = {"in_proj_b": per_key, "in_proj_a": per_key}
            return split_sizes_of_groups(name, source, "in_proj_ba", parts, groups)
        return super().convert(name, source)


class Qwen3_5MoeForCausalLM(Qwen3NextForCausalLM):
    """Qwen 3.5 and 3.6 with experts (Qwen team 2026), text only."""

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {"model.language_model.": "model."}
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        ".linear_attn.": ".self_attn.",
        ".in_proj_qkv.": ".in_proj_qkvz.",
    }

    def split_delta_net(
        self, name: str, source: CheckpointTensor, sizes: DeltaNetSizes
    ) -> NamedTensors:
        if ".in_proj_qkvz." in name:  # Qwen 3.5 stores z separately
            return split_features(name, source, "in_proj_qkvz", sizes.mixed_parts("in_"))
        return super().split_delta_net(name, source, sizes)


class Qwen3_5ForCausalLM(Qwen3_5MoeForCausalLM):
    """Qwen 3.5 and 3.6, dense (Qwen team 2026), text only."""

    layer_type = DeltaNetLayer
