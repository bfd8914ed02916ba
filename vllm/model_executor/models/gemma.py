"""Gemma 1 to 3 (text): GEGLU, scaled embeddings, and norms whose stored weights are minus 1."""

from dataclasses import replace
from typing import ClassVar

from vllm.config import ModelArch
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderOptions,
    PrePostNormLayer,
    llama_options,
    rms_norm,
)
from vllm.model_executor.models.fused_weights import add_one_to_norms
from vllm.ops.attention_options import AttentionOptions


class _Gemma(DecoderForCausalLM):
    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Add 1 to the stored weight of a norm."""
        return add_one_to_norms(name, source)


class GemmaForCausalLM(_Gemma):
    """Gemma (arXiv 2403.08295)."""

    def options(self, arch: ModelArch) -> DecoderOptions:
        return replace(super().options(arch), table_scale=arch.hidden_size**0.5)


class Gemma2ForCausalLM(_Gemma):
    """Gemma 2 (arXiv 2408.00118): a sliding window in every second layer, soft caps on scores and
    logits.
    """

    layer_type = PrePostNormLayer

    def options(self, arch: ModelArch) -> DecoderOptions:
        return _options(arch)


class VaultGemmaForCausalLM(_Gemma):
    """VaultGemma 1B (Google 2025, arXiv 2510.15001): Gemma 2 without norms after attention
    and MLP."""

    checkpoint_names: ClassVar[dict[str, str]] = {
        ".pre_feedforward_layernorm.": ".post_attention_layernorm."
    }

    def options(self, arch: ModelArch) -> DecoderOptions:
        return _options(arch)


class Gemma3ForCausalLM(_Gemma):
    """Gemma 3, text only (arXiv 2503.19786). Five layers with a sliding window alternate with one
    without; each kind has its own rotary parameters. Heads are normed.
    """

    layer_type = PrePostNormLayer

    def options(self, arch: ModelArch) -> DecoderOptions:
        return replace(_options(arch), head_norm=rms_norm)


def _options(arch: ModelArch) -> DecoderOptions:
    config = arch.hf_config
    scalar = config.get("query_pre_attn_scalar")
    return replace(
        llama_options(arch),
        attention=AttentionOptions(
            None if scalar is None else float(scalar) ** -0.5,
            logits_soft_cap=config.get("attn_logit_softcapping"),
        ),
        table_scale=arch.hidden_size**0.5,
        logit_soft_cap=config.get("final_logit_softcapping"),
    )
