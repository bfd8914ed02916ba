"""Llama 1 to 3.3, CodeLlama, and the many models of the same kind (Granite 3B Code, ...)."""

from typing import ClassVar

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.model_executor.models.decoder import DecoderForCausalLM, DecoderOptions


class LlamaForCausalLM(DecoderForCausalLM):
    """Llama 1 to 3.3, CodeLlama, Granite 3B and 8B Code, SmolLM and many more (Touvron et al. 2023,
    arXiv 2302.13971; Grattafiori et al. 2024, arXiv 2407.21783)."""

    checkpoint_names: ClassVar[dict[str, str]] = {
        ".ln1.": ".input_layernorm.",  # Yi, before it was published as a Llama
        ".ln2.": ".post_attention_layernorm.",
    }

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp, llama_options(arch))


def llama_options(arch: ModelArch) -> DecoderOptions:
    """Which projections have a bias, where config.json says it as it does for Llama."""
    has_attention_bias = bool(arch.hf_config.get("attention_bias", False))
    return DecoderOptions(
        qkv_bias=has_attention_bias,
        output_bias=has_attention_bias,
        mlp_bias=bool(arch.hf_config.get("mlp_bias", False)),
    )
