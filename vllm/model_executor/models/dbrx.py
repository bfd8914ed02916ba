"""DBRX: a decoder with layer norms, clipped queries, keys and values, and experts in all layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from vllm.config import ModelArch
from vllm.errors import ConfigError, WeightLoadError
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderLayer,
    DecoderOptions,
    LayerSpec,
    layer_norm_without_bias,
)
from vllm.model_executor.models.fused_weights import FusedLayers, qkv_parts
from vllm.model_executor.models.mixture import Mixture, mixture_options

_MATRICES = {"w1": "gate_proj", "v1": "up_proj", "w2": "down_proj"}
"""Parameter with the matrices of all experts, one after the other -> matrix of one."""


class DbrxLayer(DecoderLayer):
    """A `DecoderLayer` with experts."""

    def make_mlp(self, spec: LayerSpec) -> nn.Module:
        routing = spec.arch.hf_config.get("ffn_config") or {}
        power = routing.get("moe_normalize_expert_weights", 1)
        if power not in (None, 1):
            raise ConfigError(
                f"ffn_config.moe_normalize_expert_weights in config.json must be null or 1 for "
                f"{spec.arch.architecture}, got {power!r}"
            )
        act = routing.get("ffn_act_fn") or {"name": "silu"}
        if not isinstance(act, Mapping) or act.get("name", "silu") != "silu":
            raise ConfigError(
                f"ffn_config.ffn_act_fn in config.json must have the name 'silu' for "
                f"{spec.arch.architecture}, got {act!r}"
            )
        weights = replace(
            mixture_options(spec.arch), routing="softmax" if power is None else "softmax_of_chosen"
        )
        return Mixture(spec.arch, weights, spec.tp)


class DbrxForCausalLM(DecoderForCausalLM):
    """DBRX 132B (Databricks 2024, "Introducing DBRX")."""

    layer_type = DbrxLayer
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "transformer.wte.": "model.embed_tokens.",
        "transformer.blocks.": "model.layers.",
        "transformer.norm_f.": "model.norm.",
        ".norm_attn_norm.norm_1.": ".input_layernorm.",
        ".norm_attn_norm.norm_2.": ".post_attention_layernorm.",
        ".norm_attn_norm.attn.Wqkv.": ".self_attn.qkv_proj.",
        ".norm_attn_norm.attn.out_proj.": ".self_attn.o_proj.",
        ".ffn.router.layer.": ".mlp.gate.",
        ".ffn.experts.mlp.": ".mlp.experts.",
    }
    fused_layers: ClassVar[FusedLayers] = {"qkv_proj": qkv_parts}

    def options(self, arch: ModelArch) -> DecoderOptions:
        attention: Mapping[str, Any] = arch.hf_config.get("attn_config") or {}
        limits = replace(arch, hf_config=attention)
        return DecoderOptions(
            norm=layer_norm_without_bias, qkv_limit=limits.config_number("clip_qkv", 0.0) or None
        )

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Split tensors with the matrices of all experts."""
        parent, _, kind = name.rpartition("experts.")
        if kind not in _MATRICES:
            return super().convert(name, source)
        return self._by_expert(parent, name, kind, source)

    def _by_expert(
        self, parent: str, name: str, kind: str, source: CheckpointTensor
    ) -> NamedTensors:
        size, count = self.arch.intermediate_size, mixture_options(self.arch).num_experts
        if len(source.shape) != 2 or source.shape[0] != count * size:
            raise WeightLoadError(
                f"tensor {name} has shape {list(source.shape)} in the checkpoint, the model needs "
                f"{count * size} in dimension 0: {count} experts of {size} each"
            )
        for expert in range(count):
            matrix = source.narrow(0, expert * size, size)
            if kind == "w2":
                matrix = matrix.mapped(_transposed)
            yield f"{parent}experts.{expert}.{_MATRICES[kind]}.weight", matrix


def _transposed(matrix: Tensor) -> Tensor:
    return matrix.T
