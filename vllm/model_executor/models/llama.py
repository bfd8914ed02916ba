"""Llama 1 to 3.3, CodeLlama, and the many models of the same kind (Granite 3B Code, ...)."""

from dataclasses import replace
from typing import ClassVar

from vllm.config import ModelArch
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderOptions,
    layer_norm,
    llama_options,
    rms_norm,
)


def hunyuan_options(arch: ModelArch) -> DecoderOptions:
    """Return the decoder options of Hunyuan: heads are normed after the rotary embedding."""
    has_norms = bool(arch.hf_config.get("use_qk_norm", True))
    return replace(
        llama_options(arch),
        mlp_bias=False,
        head_norm=rms_norm if has_norms else None,
        norms_rotated_heads=True,
    )


class LlamaForCausalLM(DecoderForCausalLM):
    """Llama 1 to 3.3, CodeLlama, Granite 3B and 8B Code, SmolLM and many more (Touvron et al. 2023,
    arXiv 2302.13971; Grattafiori et al. 2024, arXiv 2407.21783)."""

    checkpoint_names: ClassVar[dict[str, str]] = {
        ".ln1.": ".input_layernorm.",  # names of Yi checkpoints before they were published as Llama
        ".ln2.": ".post_attention_layernorm.",
    }


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """SmolLM 3 (Hugging Face 2025): a Llama in which every fourth layer has no rotary positions."""


class CwmForCausalLM(LlamaForCausalLM):
    """Code World Model (Meta 2025, arXiv 2510.02387): a sliding window in three of four layers."""


class SeedOssForCausalLM(DecoderForCausalLM):
    """Seed-OSS 36B (ByteDance 2025): a Llama with a config switch for each bias of attention."""

    def options(self, arch: ModelArch) -> DecoderOptions:
        has_output_bias = bool(arch.hf_config.get("attention_out_bias", False))
        return replace(super().options(arch), output_bias=has_output_bias)


class HeliumForCausalLM(DecoderForCausalLM):
    """Helium 1 (Kyutai 2025): a Llama whose rotary pairs are neighbouring elements."""

    def options(self, arch: ModelArch) -> DecoderOptions:
        return replace(super().options(arch), is_neox=False, output_bias=False)


class Ernie4_5ForCausalLM(DecoderForCausalLM):
    """ERNIE 4.5, dense (Baidu 2025): a Llama whose rotary pairs are neighbouring elements."""

    def options(self, arch: ModelArch) -> DecoderOptions:
        has_bias = bool(arch.hf_config.get("use_bias", False))
        return DecoderOptions(
            qkv_bias=has_bias, output_bias=has_bias, mlp_bias=has_bias, is_neox=False
        )


class ArceeForCausalLM(DecoderForCausalLM):
    """Arcee AFM 4.5B (Arcee AI 2025): a Llama with an MLP of squared ReLU without gate."""

    def options(self, arch: ModelArch) -> DecoderOptions:
        return replace(super().options(arch), is_gated=False)


class Jais2ForCausalLM(DecoderForCausalLM):
    """Jais 2 (Inception 2025): Arcee's model with layer norms and biases."""

    def options(self, arch: ModelArch) -> DecoderOptions:
        return replace(super().options(arch), norm=layer_norm, is_gated=False)


class HunYuanDenseV1ForCausalLM(DecoderForCausalLM):
    """Hunyuan 0.5B to 7B, dense (Tencent 2025): heads are normed after the rotary embedding."""

    options = staticmethod(hunyuan_options)
    checkpoint_names: ClassVar[dict[str, str]] = {
        ".query_layernorm.": ".q_norm.",
        ".key_layernorm.": ".k_norm.",
    }
