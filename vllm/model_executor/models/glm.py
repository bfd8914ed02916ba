"""GLM 4, and ChatGLM 2 and 3, which differ only in tensor names."""

from collections.abc import Mapping
from typing import ClassVar

from vllm.config import ModelArch
from vllm.model_executor.models.decoder import DecoderForCausalLM, DecoderOptions, PrePostNormLayer
from vllm.model_executor.models.fused_weights import FusedLayers, gate_up_parts, qkv_parts


class GlmForCausalLM(DecoderForCausalLM):
    """GLM-4-9B (Team GLM 2024, arXiv 2406.12793). Half of each head has rotary positions, in pairs
    of neighbouring elements.
    """

    fused_layers: ClassVar[FusedLayers] = {"gate_up_proj": gate_up_parts}

    def options(self, arch: ModelArch) -> DecoderOptions:
        has_bias = arch.config_flag("attention_bias")
        return DecoderOptions(qkv_bias=has_bias, is_neox=False)


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4-0414: norms before and after attention and MLP."""

    layer_type = PrePostNormLayer
    checkpoint_names: ClassVar[dict[str, str]] = {
        ".post_attention_layernorm.": ".pre_feedforward_layernorm.",
        ".post_self_attn_layernorm.": ".post_attention_layernorm.",
        ".post_mlp_layernorm.": ".post_feedforward_layernorm.",
    }


class ChatGLMModel(GlmForCausalLM):
    """ChatGLM 2 and 3, CodeGeeX 2, and GLM-4-9B as it was first published (Team GLM 2024, arXiv
    2406.12793)."""

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {
        "transformer.embedding.word_embeddings.": "model.embed_tokens.",
        "transformer.output_layer.": "lm_head.",
        "transformer.encoder.final_layernorm.": "model.norm.",
        "transformer.encoder.": "model.",
    }
    checkpoint_names: ClassVar[dict[str, str]] = {
        ".self_attention.dense.": ".self_attn.o_proj.",
        ".query_key_value.": ".qkv_proj.",
        ".self_attention.": ".self_attn.",
        ".dense_h_to_4h.": ".gate_up_proj.",
        ".dense_4h_to_h.": ".down_proj.",
    }
    ignored_tensors = ("rotary_pos_emb.inv_freq",)
    fused_layers: ClassVar[FusedLayers] = {"qkv_proj": qkv_parts, "gate_up_proj": gate_up_parts}
