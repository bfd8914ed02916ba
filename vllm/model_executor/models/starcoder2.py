"""StarCoder2."""

from typing import ClassVar

from vllm.config import ModelArch
from vllm.model_executor.models.decoder import DecoderForCausalLM, DecoderOptions, layer_norm


class Starcoder2ForCausalLM(DecoderForCausalLM):
    """StarCoder2 3B, 7B and 15B (Lozhkov et al. 2024, arXiv 2402.19173)."""

    checkpoint_names: ClassVar[dict[str, str]] = {
        ".mlp.c_fc.": ".mlp.up_proj.",
        ".mlp.c_proj.": ".mlp.down_proj.",
    }

    def options(self, arch: ModelArch) -> DecoderOptions:
        has_bias = bool(arch.hf_config.get("use_bias", True))
        return DecoderOptions(
            norm=layer_norm,
            qkv_bias=has_bias,
            output_bias=has_bias,
            mlp_bias=has_bias,
            is_gated=False,
        )
