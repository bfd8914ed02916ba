"""Llama 4, text only."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.model_executor.layers.rotary import RotaryEmbedding
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import (
    DecoderAttention,
    DecoderForCausalLM,
    DecoderLayer,
    DecoderOptions,
    LayerSpec,
    QueryTemperature,
)
from vllm.model_executor.models.fused_weights import (
    JOINED_EXPERTS,
    experts_in,
    split_transposed_experts,
)
from vllm.model_executor.models.mixture import Mixture, MixtureOptions
from vllm.ops import get_ops
from vllm.ops.attention_options import AttentionOptions
from vllm.ops.expert_options import ExpertOptions


class Llama4Attention(DecoderAttention):
    """Attention within chunks of tokens, with rotary positions and normed heads.

    Every fourth layer attends to all tokens instead, without rotary positions, and gets sharper in
    longer texts (arXiv 2501.19399).
    """

    norm: Tensor | None
    """[head_size] ones: the norms of heads have no weights."""

    def __init__(
        self,
        arch: ModelArch,
        options: DecoderOptions,
        rotary_emb: RotaryEmbedding | None,
        tp: TPGroup,
    ) -> None:
        config = arch.hf_config
        if rotary_emb is not None and config.get("attention_chunk_size"):
            chunk_size = arch.config_size("attention_chunk_size")
            options = replace(options, attention=AttentionOptions(chunk_size=chunk_size))
        if rotary_emb is None and arch.config_flag("attn_temperature_tuning", True):
            scale = arch.config_number("attn_scale", 0.1)
            step = arch.config_number("floor_scale", 8192)
            options = replace(options, temperature=QueryTemperature(scale, step, offset=1))
        super().__init__(arch, options, None, rotary_emb, tp)
        self.norm_eps = arch.norm_eps
        norm = None
        if rotary_emb is not None and arch.config_flag("use_qk_norm", True):
            norm = torch.ones(arch.head_size, device="cpu")
        self.register_buffer("norm", norm, persistent=False)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        q, k, v = self.project(hidden_states)
        if self.rotary_emb is not None:
            q, k = self.rotary_emb(positions, q, k)
        if self.norm is not None:
            q, k = (get_ops().rms_norm(x, self.norm, self.norm_eps) for x in (q, k))
        q = self.tempered(q, positions)
        return self.o_proj(self.attn(q, k, v).flatten(1))


class Llama4Layer(DecoderLayer):
    """A `DecoderLayer`; in some or all layers the MLP runs in parallel to experts.

    Each token uses one of the experts.
    """

    def make_attention(self, spec: LayerSpec) -> nn.Module:
        return Llama4Attention(spec.arch, spec.options, spec.rotary_emb, spec.tp)

    def make_mlp(self, spec: LayerSpec) -> nn.Module:
        arch = spec.arch
        step = arch.config_count("interleave_moe_layer_step") or 1
        moe_layers = arch.hf_config.get("moe_layers")  # none in Llama Guard 4
        if moe_layers is None:
            moe_layers = range(step - 1, arch.num_layers, step)
        if spec.index not in moe_layers:
            size = arch.config_size("intermediate_size_mlp")
            return super().make_mlp(replace(spec, arch=replace(arch, intermediate_size=size)))
        mixture = MixtureOptions(
            num_experts=arch.config_size("num_local_experts"),
            top_k=arch.config_count("num_experts_per_tok") or 1,
            intermediate_size=arch.intermediate_size,
            routing="sigmoid",
            shared_size=arch.intermediate_size,
            has_shared_gate=False,
            experts=ExpertOptions(scales_inputs=True),
        )
        return Mixture(arch, mixture, spec.tp)


class Llama4ForCausalLM(DecoderForCausalLM):
    """Llama 4 Scout and Maverick, text only (Meta 2025, "The Llama 4 herd"). It has experts,
    attention within chunks, and some layers without rotary positions.
    """

    layer_type = Llama4Layer
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {"language_model.": ""}
    checkpoint_names: ClassVar[dict[str, str]] = {
        ".feed_forward.": ".mlp.",
        ".mlp.router.": ".mlp.gate.",
    }

    def options(self, arch: ModelArch) -> DecoderOptions:
        return replace(super().options(arch), is_neox=False)

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Split tensors with the weights of all experts, [experts, in, out]: gates, then ups."""
        # Quantized experts are saved one by one.
        if name.rpartition(".experts.")[2] not in JOINED_EXPERTS:
            return ((name, source),)
        experts_in(name, source, self.arch.config_size("num_local_experts"))
        return split_transposed_experts(name, source)
