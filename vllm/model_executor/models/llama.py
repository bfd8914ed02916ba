"""Llama 1 to 3.3, CodeLlama, and other models of this kind: Mistral, Qwen 2 and 3, InternLM, ..."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch.nn.functional as F

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderOptions,
    QueryTemperature,
    layer_norm,
    llama_options,
    rms_norm,
)
from vllm.model_executor.models.fused_weights import FusedLayers, qkv_groups, qkv_parts

_BAICHUAN_1_VOCAB_SIZE = 64000


def hunyuan_options(arch: ModelArch) -> DecoderOptions:
    """Return the decoder options of Hunyuan: heads are normed after the rotary embedding."""
    has_norms = arch.config_flag("use_qk_norm", True)
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
        has_output_bias = arch.config_flag("attention_out_bias")
        return replace(super().options(arch), output_bias=has_output_bias)


class HeliumForCausalLM(DecoderForCausalLM):
    """Helium 1 (Kyutai 2025): a Llama whose rotary pairs are neighbouring elements."""

    def options(self, arch: ModelArch) -> DecoderOptions:
        return replace(super().options(arch), is_neox=False, output_bias=False)


class Ernie4_5ForCausalLM(DecoderForCausalLM):
    """ERNIE 4.5, dense (Baidu 2025): a Llama whose rotary pairs are neighbouring elements."""

    def options(self, arch: ModelArch) -> DecoderOptions:
        has_bias = arch.config_flag("use_bias")
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


class ApertusForCausalLM(DecoderForCausalLM):
    """Apertus 8B and 70B (Swiss AI 2025, arXiv 2509.14233). A Llama with normed heads and an MLP
    without gate, whose activation has learned parameters.
    """

    checkpoint_names: ClassVar[dict[str, str]] = {
        ".attention_layernorm.": ".input_layernorm.",
        ".feedforward_layernorm.": ".post_attention_layernorm.",
        ".mlp.act_fn.": ".mlp.act.",
    }
    ignored_tensors = ("rotary_emb.inv_freq", ".act_fn.beta", ".act_fn.eps")

    def options(self, arch: ModelArch) -> DecoderOptions:
        return replace(super().options(arch), mlp_bias=False, is_gated=False, head_norm=rms_norm)


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
        has_bias = arch.config_flag("bias")
        return DecoderOptions(qkv_bias=has_bias, output_bias=has_bias)


class InternLM3ForCausalLM(DecoderForCausalLM):
    """InternLM 3 (Shanghai AI Laboratory 2025): a Llama with other names for biases in its
    config.
    """

    def options(self, arch: ModelArch) -> DecoderOptions:
        has_bias = arch.config_flag("bias", arch.config_flag("mlp_bias"))
        return DecoderOptions(
            qkv_bias=arch.config_flag("qkv_bias", arch.config_flag("attention_bias")),
            output_bias=has_bias,
            mlp_bias=has_bias,
        )


class BaichuanForCausalLM(DecoderForCausalLM):
    """Baichuan 1 and 2 (Yang et al. 2023, arXiv 2309.10305): a Llama. The 13B models have ALiBi
    instead of rotary positions. The rows of the output head of Baichuan 2 are normalized to length
    1.
    """

    checkpoint_names: ClassVar[dict[str, str]] = {".W_pack.": ".qkv_proj."}
    fused_layers: ClassVar[FusedLayers] = {"qkv_proj": qkv_parts}

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp)
        self.has_normed_head = arch.vocab_size != _BAICHUAN_1_VOCAB_SIZE

    def options(self, arch: ModelArch) -> DecoderOptions:
        return DecoderOptions(alibi_scale=1.0 if arch.rope is None else 0.0)

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Normalize the rows of Baichuan 2's output head."""
        if name == "lm_head.weight" and self.has_normed_head:
            return ((name, source.mapped(F.normalize)),)
        return super().convert(name, source)


class ExaoneForCausalLM(LlamaForCausalLM):
    """EXAONE 3, 3.5 and Deep (LG AI Research 2024, arXiv 2408.03541): a Llama with other tensor
    names.
    """

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {
        "transformer.wte.": "model.embed_tokens.",
        "transformer.ln_f.": "model.norm.",
        "transformer.h.": "model.layers.",
    }
    checkpoint_names: ClassVar[dict[str, str]] = {
        ".attn.attention.": ".self_attn.",
        ".self_attn.out_proj.": ".self_attn.o_proj.",
        ".ln_1.": ".input_layernorm.",
        ".ln_2.": ".post_attention_layernorm.",
        ".mlp.c_fc_0.": ".mlp.gate_proj.",
        ".mlp.c_fc_1.": ".mlp.up_proj.",
        ".mlp.c_proj.": ".mlp.down_proj.",
    }
    ignored_tensors = ("rotary.inv_freq", "rotary_emb.inv_freq")


class MistralForCausalLM(DecoderForCausalLM):
    """Mistral 7B, Nemo, Small (Jiang et al. 2023, arXiv 2310.06825). The sliding windows are in
    `arch.layer_windows`.
    """

    def options(self, arch: ModelArch) -> DecoderOptions:
        temperature = None
        scaling = {} if arch.rope is None else arch.rope.scaling
        if scaling.get("llama_4_scaling_beta"):
            scale, step = (
                float(scaling[name])
                for name in ("llama_4_scaling_beta", "original_max_position_embeddings")
            )
            temperature = QueryTemperature(scale, step)
        return DecoderOptions(temperature=temperature)


class Ministral3ForCausalLM(MistralForCausalLM):
    """Ministral 3 (Mistral AI 2025, arXiv 2601.08584): attention is sharper in long texts."""


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Qwen 1.5 to 2.5, QwQ, DeepSeek-R1-Distill-Qwen (arXiv 2407.10671). Later layers may have a
    sliding window."""

    def options(self, arch: ModelArch) -> DecoderOptions:
        return DecoderOptions(qkv_bias=True)


class MiMoForCausalLM(Qwen2ForCausalLM):
    """MiMo 7B (Xiaomi 2025, arXiv 2505.07608). Its layers for multi-token prediction are loaded
    only by `vllm.model_executor.speculators.mtp`.
    """

    ignored_prefixes: ClassVar[tuple[str, ...]] = ("model.mtp_layers.",)


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Qwen 3, dense (Yang et al. 2025, arXiv 2505.09388)."""

    def options(self, arch: ModelArch) -> DecoderOptions:
        return replace(super().options(arch), head_norm=rms_norm)
