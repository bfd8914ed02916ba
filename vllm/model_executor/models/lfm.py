"""LFM2 and LFM2-MoE: decoders with short convolutions in most layers and attention in some."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from vllm.attention import StateLayer, States
from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.model_executor.layers.grouped_router import Routing
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.mamba import Convolution
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors, SlicedModule
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderLayer,
    DecoderOptions,
    GatedMLP,
    LayerSpec,
    rms_norm,
)
from vllm.model_executor.models.deepseek import DeepseekMixture
from vllm.model_executor.models.fused_weights import NUMBERED_MATRICES, FusedLayers, FusedParts
from vllm.ops.expert_options import RoutingOptions


class ShortConvolution(SlicedModule, StateLayer):
    """A gated short convolution: out(c * convolution(b * x)), with b, c and x projected from the
    token.

    Its channels are split over ranks. Liquid AI 2025, arXiv 2511.23404, section 2.

    Args:
        hidden_size: features of a token, and channels over all ranks.
        kernel: number of tokens that the convolution sees.
        has_bias: whether the convolution and the projections have biases.
        tp: the ranks that share the channels.

    Shape: positions [T], hidden_states [T, hidden] -> [T, hidden]
    """

    cache_names: ClassVar[tuple[str, ...]] = ("window",)

    window: Tensor | None
    """[rows, K - 1, channels] the last inputs of the convolution."""

    def __init__(self, hidden_size: int, kernel: int, has_bias: bool, tp: TPGroup) -> None:
        super().__init__()
        in_parts = dict.fromkeys(("in_b", "in_c", "in_x"), hidden_size)
        self.in_proj = ColumnParallelLinear(hidden_size, in_parts, tp, bias=has_bias)
        self.conv1d = Convolution({"": hidden_size}, kernel, has_bias, tp, has_silu=False)
        self.o_proj = RowParallelLinear(hidden_size, hidden_size, tp, bias=has_bias)

    def state_shapes(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        conv = self.conv1d
        return (((conv.kernel - 1, conv.num_channels), conv.weight.dtype),)

    def input_shapes(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        return (((self.conv1d.num_channels,), self.conv1d.weight.dtype),)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        b, c, x = self.in_proj(hidden_states).chunk(3, dim=-1)
        mixed = c * self.run_sequences(b * x)
        return self.o_proj(mixed.to(hidden_states.dtype))

    def advance(
        self, inputs: tuple[Tensor, ...], lengths: Tensor | None, states: States
    ) -> tuple[Tensor, States]:
        mixed, window = self.conv1d(*inputs, *states, lengths)
        return mixed, (window,)


class Lfm2Layer(DecoderLayer):
    """A `DecoderLayer` with a short convolution or attention."""

    def make_attention(self, spec: LayerSpec) -> nn.Module:
        arch = spec.arch
        if not arch.state_layers[spec.index]:
            return super().make_attention(spec)
        has_bias = arch.config_flag("conv_bias")
        return ShortConvolution(
            arch.hidden_size, arch.config_size("conv_L_cache"), has_bias, spec.tp
        )

    def make_mlp(self, spec: LayerSpec) -> nn.Module:
        return GatedMLP(replace(spec.arch, intermediate_size=_mlp_size(spec.arch)), False, spec.tp)


def _convolution_parts(arch: ModelArch) -> FusedParts:
    """Return the parts of the input projection of a short convolution."""
    return FusedParts(dict.fromkeys(("in_b", "in_c", "in_x"), arch.hidden_size))


class Lfm2ForCausalLM(DecoderForCausalLM):
    """LFM2 350M to 2.6B (Liquid AI 2025, arXiv 2511.23404)."""

    layer_type = Lfm2Layer

    checkpoint_names: ClassVar[Mapping[str, str]] = {
        ".conv.conv.": ".self_attn.conv1d.",
        ".conv.": ".self_attn.",
        ".out_proj.": ".o_proj.",
        ".q_layernorm.": ".q_norm.",
        ".k_layernorm.": ".k_norm.",
        ".operator_norm.": ".input_layernorm.",
        ".ffn_norm.": ".post_attention_layernorm.",
        ".embedding_norm.": ".norm.",
        ".feed_forward.": ".mlp.",
        **NUMBERED_MATRICES,
    }
    fused_layers: ClassVar[FusedLayers] = {"in_proj": _convolution_parts}

    def options(self, arch: ModelArch) -> DecoderOptions:
        return DecoderOptions(head_norm=rms_norm)


class Lfm2MoeLayer(Lfm2Layer):
    """An `Lfm2Layer` with experts; the first layers of the model have an MLP instead."""

    def make_mlp(self, spec: LayerSpec) -> nn.Module:
        arch = spec.arch
        if spec.index < arch.config_count("num_dense_layers"):
            return GatedMLP(arch, False, spec.tp)
        size = arch.config_size("moe_intermediate_size")
        return DeepseekMixture(arch, _routing(arch), size, 0, spec.tp)


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """LFM2-8B-A1B (Liquid AI 2025, arXiv 2511.23404)."""

    layer_type = Lfm2MoeLayer

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Rename the bias for choosing experts to the router's parameter."""
        name = name.replace(".mlp.expert_bias", ".mlp.gate.e_score_correction_bias")
        return super().convert(name, source)


def _mlp_size(arch: ModelArch) -> int:
    """Return the intermediate size of an MLP, adjusted as config.json asks for."""
    _config, size = arch.hf_config, arch.intermediate_size
    if not arch.config_flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(arch.config_number("block_ffn_dim_multiplier") * int(2 * size / 3))
    multiple = arch.config_size("block_multiple_of")
    return -(-size // multiple) * multiple


def _routing(arch: ModelArch) -> Routing:
    options = RoutingOptions(
        top_k=arch.config_size("num_experts_per_tok"),
        weights="sigmoid_of_chosen" if arch.config_flag("norm_topk_prob", True) else "sigmoid",
        scale=arch.config_number("routed_scaling_factor"),
    )
    has_bias = arch.config_flag("use_expert_bias", True)
    return Routing(arch.config_size("num_experts"), options, has_bias)
