"""Mistral: a Llama without biases whose attention may have a sliding window."""

from vllm.config import ModelArch
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderOptions,
    QueryTemperature,
)


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
