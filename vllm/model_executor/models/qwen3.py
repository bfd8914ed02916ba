"""Qwen3, dense: query and key heads are normed before the rotation."""

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.model_executor.models.decoder import DecoderForCausalLM, DecoderOptions, rms_norm


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Qwen 3, dense (Yang et al. 2025, arXiv 2505.09388)."""

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        has_attention_bias = bool(arch.hf_config.get("attention_bias", False))
        options = DecoderOptions(
            qkv_bias=has_attention_bias, output_bias=has_attention_bias, head_norm=rms_norm
        )
        super().__init__(arch, tp, options)
