"""GPT-NeoX (Pythia, Dolly, ...) and GPT-J."""

from typing import ClassVar

from torch import nn

from vllm.config import ModelArch
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


class GPTNeoXForCausalLM(DecoderForCausalLM):
    """GPT-NeoX 20B, Pythia, Dolly 2 (Black et al. 2022, arXiv 2204.06745)."""

    checkpoint_names: ClassVar[dict[str, str]] = {
        "gpt_neox.embed_in.": "model.embed_tokens.",
        "gpt_neox.layers.": "model.layers.",
        "gpt_neox.final_layer_norm.": "model.norm.",
        "embed_out.": "lm_head.",
        ".attention.query_key_value.": ".self_attn.qkv_proj.",
        ".attention.dense.": ".self_attn.o_proj.",
        ".mlp.dense_h_to_4h.": ".mlp.up_proj.",
        ".mlp.dense_4h_to_h.": ".mlp.down_proj.",
    }
    ignored_tensors: ClassVar[tuple[str, ...]] = (
        *(".attention.bias", ".attention.masked_bias"),
        ".attention.rotary_emb.inv_freq",
    )
    fused_layers: ClassVar[FusedLayers] = {"qkv_proj": qkv_groups}

    def options(self, arch: ModelArch) -> DecoderOptions:
        has_bias = bool(arch.hf_config.get("attention_bias", True))
        return DecoderOptions(
            norm=layer_norm, qkv_bias=has_bias, output_bias=has_bias, mlp_bias=True, is_gated=False
        )

    def make_layer(self, spec: LayerSpec) -> nn.Module:
        is_parallel = spec.arch.hf_config.get("use_parallel_residual", True)
        return ParallelLayerOfTwoNorms(spec) if is_parallel else DecoderLayer(spec)


class GPTJForCausalLM(DecoderForCausalLM):
    """GPT-J 6B (Wang and Komatsuzaki 2021)."""

    layer_type = ParallelLayer
    checkpoint_names: ClassVar[dict[str, str]] = {
        "transformer.wte.": "model.embed_tokens.",
        "transformer.h.": "model.layers.",
        "transformer.ln_f.": "model.norm.",
        ".ln_1.": ".input_layernorm.",
        ".attn.out_proj.": ".self_attn.o_proj.",
        ".attn.": ".self_attn.",
        ".mlp.fc_in.": ".mlp.up_proj.",
        ".mlp.fc_out.": ".mlp.down_proj.",
    }
    ignored_tensors: ClassVar[tuple[str, ...]] = (".attn.bias", ".attn.masked_bias")

    def options(self, arch: ModelArch) -> DecoderOptions:
        return DecoderOptions(
            norm=layer_norm, mlp_bias=True, is_gated=False, is_neox=False, head_bias=True
        )
