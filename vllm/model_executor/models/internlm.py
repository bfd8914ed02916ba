"""InternLM 2 and 3."""

from collections.abc import Mapping
from typing import ClassVar

from vllm.config import ModelArch
from vllm.model_executor.models.decoder import DecoderForCausalLM, DecoderOptions
from vllm.model_executor.models.fused_weights import FusedLayers, qkv_groups


class InternLM2ForCausalLM(DecoderForCausalLM):
    """InternLM 2 and 2.5 (Cai et al. 2024, arXiv 2403.17297): a Llama with other tensor names."""

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {
        "model.tok_embeddings.": "model.embed_tokens.",
        "output.": "lm_head.",
    }
    checkpoint_names: ClassVar[dict[str, str]] = {
        ".attention.wqkv.": ".self_attn.qkv_proj.",
        ".attention.wo.": ".self_attn.o_proj.",
        ".attention_norm.": ".input_layernorm.",
        ".ffn_norm.": ".post_attention_layernorm.",
        ".feed_forward.w1.": ".mlp.gate_proj.",
        ".feed_forward.w2.": ".mlp.down_proj.",
        ".feed_forward.w3.": ".mlp.up_proj.",
    }
    fused_layers: ClassVar[FusedLayers] = {"qkv_proj": qkv_groups}

    def options(self, arch: ModelArch) -> DecoderOptions:
        has_bias = bool(arch.hf_config.get("bias", False))
        return DecoderOptions(qkv_bias=has_bias, output_bias=has_bias)


class InternLM3ForCausalLM(DecoderForCausalLM):
    """InternLM 3 (Shanghai AI Laboratory 2025): a Llama with other names for biases in its
    config.
    """

    def options(self, arch: ModelArch) -> DecoderOptions:
        config = arch.hf_config  # transformers has other names for these settings
        has_bias = bool(config.get("bias", config.get("mlp_bias", False)))
        return DecoderOptions(
            qkv_bias=bool(config.get("qkv_bias", config.get("attention_bias", False))),
            output_bias=has_bias,
            mlp_bias=has_bias,
        )
