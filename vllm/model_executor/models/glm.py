"""GLM 4, and ChatGLM 2 and 3, which differ only in tensor names."""

from collections.abc import Iterable, Mapping
from typing import ClassVar

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.model_executor.layers.slice import CheckpointTensor
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderLayer,
    DecoderOptions,
    Layer,
    PrePostNormLayer,
)
from vllm.model_executor.models.fused_weights import qkv_sizes, split_features


class GlmForCausalLM(DecoderForCausalLM):
    """GLM-4-9B (Team GLM 2024, arXiv 2406.12793). Half of each head has rotary positions, in pairs
    of neighbouring elements.
    """

    layer: ClassVar[type[Layer]] = DecoderLayer

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        has_bias = bool(arch.hf_config.get("attention_bias", False))
        super().__init__(arch, tp, DecoderOptions(qkv_bias=has_bias, is_neox=False), self.layer)

    def convert(
        self, name: str, source: CheckpointTensor
    ) -> Iterable[tuple[str, CheckpointTensor]]:
        """Split the fused gate and up projection of the MLP."""
        if ".gate_up_proj." not in name:
            return ((name, source),)
        size = self.arch.intermediate_size
        return split_features(name, source, "gate_up_proj", {"gate_proj": size, "up_proj": size})


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4-0414: norms before and after attention and MLP."""

    layer = PrePostNormLayer

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

    def convert(
        self, name: str, source: CheckpointTensor
    ) -> Iterable[tuple[str, CheckpointTensor]]:
        """Split the fused projections of attention and of the MLP."""
        if ".qkv_proj." in name:
            return split_features(name, source, "qkv_proj", qkv_sizes(self.arch))
        return super().convert(name, source)
