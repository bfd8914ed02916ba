"""Qwen 1.5, 2 and 2.5: Llama with a bias on query, key and value."""

from typing import ClassVar

from vllm.config import ModelArch
from vllm.model_executor.models.decoder import DecoderForCausalLM, DecoderOptions


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
