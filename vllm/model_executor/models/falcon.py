"""Falcon."""

from dataclasses import replace
from typing import ClassVar

from torch import nn

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderLayer,
    DecoderOptions,
    LayerSpec,
    ParallelLayer,
    ParallelLayerOfTwoNorms,
    layer_norm,
)
from vllm.model_executor.models.fused_weights import FusedLayers, qkv_groups


class FalconForCausalLM(DecoderForCausalLM):
    """Falcon 7B, 11B, 40B, 180B, and RW with ALiBi (Almazrouei et al. 2023, arXiv 2311.16867)."""

    checkpoint_names: ClassVar[dict[str, str]] = {
        "transformer.word_embeddings.": "model.embed_tokens.",
        "transformer.h.": "model.layers.",
        "transformer.ln_f.": "model.norm.",
        ".ln_attn.": ".input_layernorm.",
        ".ln_mlp.": ".post_attention_layernorm.",
        ".self_attention.query_key_value.": ".self_attn.qkv_proj.",
        ".self_attention.dense.": ".self_attn.o_proj.",
        ".mlp.dense_h_to_4h.": ".mlp.up_proj.",
        ".mlp.dense_4h_to_h.": ".mlp.down_proj.",
    }
    fused_layers: ClassVar[FusedLayers] = {"qkv_proj": qkv_groups}

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        config = arch.hf_config
        if config.get("alibi"):
            arch = replace(arch, layer_ropes=(None,) * arch.num_layers)
        super().__init__(replace(arch, hidden_act=config.get("activation") or "gelu"), tp)

    def options(self, arch: ModelArch) -> DecoderOptions:
        has_bias = bool(arch.hf_config.get("bias", False))
        return DecoderOptions(
            norm=layer_norm,
            qkv_bias=has_bias,
            output_bias=has_bias,
            mlp_bias=has_bias,
            is_gated=False,
            # Falcon adds the ALiBi bias before it scales the scores.
            alibi_scale=arch.head_size**-0.5 if arch.hf_config.get("alibi") else 0.0,
        )

    def make_layer(self, spec: LayerSpec) -> nn.Module:
        config = spec.arch.hf_config
        if config.get("new_decoder_architecture"):
            num_norms = config.get("num_ln_in_parallel_attn") or 2
            return ParallelLayerOfTwoNorms(spec) if num_norms == 2 else ParallelLayer(spec)
        return ParallelLayer(spec) if config.get("parallel_attn", True) else DecoderLayer(spec)
