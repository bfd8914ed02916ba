"""BLOOM and MPT: ALiBi instead of position embeddings."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.errors import ConfigError
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderOptions,
    layer_norm,
    layer_norm_without_bias,
)
from vllm.model_executor.models.fused_weights import (
    FusedLayers,
    qkv_groups,
    qkv_parts,
)
from vllm.ops.attention_options import AttentionOptions


class BloomForCausalLM(DecoderForCausalLM):
    """BLOOM and BLOOMZ (BigScience 2022, arXiv 2211.05100)."""

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {
        f"{level}{name}": ours
        for level in ("transformer.", "")
        for name, ours in {
            "word_embeddings_layernorm.": "model.embed_norm.",
            "word_embeddings.": "model.embed_tokens.",
            "h.": "model.layers.",
            "ln_f.": "model.norm.",
        }.items()
    }
    checkpoint_names: ClassVar[dict[str, str]] = {
        ".self_attention.query_key_value.": ".self_attn.qkv_proj.",
        ".self_attention.dense.": ".self_attn.o_proj.",
        ".mlp.dense_h_to_4h.": ".mlp.up_proj.",
        ".mlp.dense_4h_to_h.": ".mlp.down_proj.",
    }
    fused_layers: ClassVar[FusedLayers] = {"qkv_proj": qkv_groups}

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(replace(arch, hidden_act="gelu_new"), tp)

    def options(self, arch: ModelArch) -> DecoderOptions:
        if arch.hf_config.get("apply_residual_connection_post_layernorm"):
            raise ConfigError(
                "apply_residual_connection_post_layernorm in config.json must be false for "
                "BloomForCausalLM, got true"
            )
        return DecoderOptions(
            norm=layer_norm,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            is_gated=False,
            alibi_scale=1.0,
            has_embedding_norm=True,
        )


class MptForCausalLM(DecoderForCausalLM):
    """MPT 7B and 30B (MosaicML 2023, "Introducing MPT-7B")."""

    checkpoint_names: ClassVar[dict[str, str]] = {
        "transformer.wte.": "model.embed_tokens.",
        "transformer.blocks.": "model.layers.",
        "transformer.norm_f.": "model.norm.",
        ".norm_1.": ".input_layernorm.",
        ".norm_2.": ".post_attention_layernorm.",
        ".attn.Wqkv.": ".self_attn.qkv_proj.",
        ".attn.out_proj.": ".self_attn.o_proj.",
        ".ffn.": ".mlp.",
    }
    fused_layers: ClassVar[FusedLayers] = {"qkv_proj": qkv_parts}

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        size = (arch.config_count("expansion_ratio") or 4) * arch.hidden_size
        super().__init__(replace(arch, hidden_act="gelu", intermediate_size=size), tp)

    def options(self, arch: ModelArch) -> DecoderOptions:
        attention = dict(arch.hf_config.get("attn_config") or {})
        if arch.num_heads & (arch.num_heads - 1):
            raise ConfigError(
                f"MPTForCausalLM with ALiBi must have a power of two heads, got {arch.num_heads}"
            )
        if not attention.get("alibi", True) or attention.get("qk_ln"):
            raise ConfigError(
                "MPTForCausalLM needs attn_config in config.json with alibi true, and qk_ln "
                "false or missing"
            )
        scale = attention.get("softmax_scale")
        return DecoderOptions(
            norm=layer_norm_without_bias,
            is_gated=False,
            alibi_scale=1.0,
            attention=AttentionOptions(None if scale is None else float(scale)),
            qkv_limit=attention.get("clip_qkv"),
        )
