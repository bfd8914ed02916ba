"""Apertus."""

from dataclasses import replace
from typing import ClassVar

from vllm.config import ModelArch
from vllm.model_executor.models.decoder import DecoderForCausalLM, DecoderOptions, rms_norm


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
