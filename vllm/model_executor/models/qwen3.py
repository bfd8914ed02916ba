"""Qwen3, dense: query and key heads are normed before the rotation."""

from dataclasses import replace

from vllm.config import ModelArch
from vllm.model_executor.models.decoder import DecoderForCausalLM, DecoderOptions, rms_norm


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Qwen 3, dense (Yang et al. 2025, arXiv 2505.09388)."""

    def options(self, arch: ModelArch) -> DecoderOptions:
        return replace(super().options(arch), head_norm=rms_norm)
