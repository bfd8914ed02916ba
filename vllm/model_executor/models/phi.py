"""Phi 1 to 4."""

from typing import ClassVar

from vllm.config import ModelArch
from vllm.errors import ConfigError
from vllm.model_executor.models.decoder import DecoderForCausalLM, DecoderOptions, ParallelLayer
from vllm.model_executor.models.fused_weights import FusedLayers, gate_up_parts, qkv_parts
from vllm.model_executor.models.gpt import gpt_options


class PhiForCausalLM(DecoderForCausalLM):
    """Phi 1, 1.5 and 2 (Li et al. 2023, arXiv 2309.05463)."""

    layer_type = ParallelLayer
    checkpoint_names: ClassVar[dict[str, str]] = {
        ".self_attn.dense.": ".self_attn.o_proj.",
        ".mlp.fc1.": ".mlp.up_proj.",
        ".mlp.fc2.": ".mlp.down_proj.",
        "model.final_layernorm.": "model.norm.",
    }

    def options(self, arch: ModelArch) -> DecoderOptions:
        if arch.config_flag("qk_layernorm"):
            raise ConfigError(
                "qk_layernorm in config.json must be false for PhiForCausalLM, got true: this "
                "engine does not normalise queries and keys of this model"
            )
        return gpt_options(has_bias=True, head_bias=True)


class Phi3ForCausalLM(DecoderForCausalLM):
    """Phi 3, 3.5 and 4 (Abdin et al. 2024, arXiv 2404.14219): a Llama with fused checkpoint
    tensors.
    """

    fused_layers: ClassVar[FusedLayers] = {"qkv_proj": qkv_parts, "gate_up_proj": gate_up_parts}
