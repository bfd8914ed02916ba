"""GLM 4."""

from collections.abc import Iterable
from typing import ClassVar

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.model_executor.layers.slice import Source
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderLayer,
    DecoderOptions,
    Layer,
    SandwichLayer,
)
from vllm.model_executor.models.fused_weights import split_rows


class GlmForCausalLM(DecoderForCausalLM):
    """GLM-4-9B (Team GLM 2024, arXiv 2406.12793): half of each head is rotated, in pairs of
    neighbouring elements."""

    layer: ClassVar[type[Layer]] = DecoderLayer

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        has_bias = bool(arch.hf_config.get("attention_bias", False))
        super().__init__(arch, tp, DecoderOptions(qkv_bias=has_bias, is_neox=False), self.layer)

    def convert(self, name: str, source: Source) -> Iterable[tuple[str, Source]]:
        """Split the fused projection of the MLP."""
        if ".gate_up_proj." not in name:
            return ((name, source),)
        size = self.arch.intermediate_size
        return split_rows(name, source, "gate_up_proj", {"gate_proj": size, "up_proj": size})


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4-0414: norms before and behind attention and MLP."""

    layer = SandwichLayer

    checkpoint_names: ClassVar[dict[str, str]] = {
        ".post_attention_layernorm.": ".pre_feedforward_layernorm.",
        ".post_self_attn_layernorm.": ".post_attention_layernorm.",
        ".post_mlp_layernorm.": ".post_feedforward_layernorm.",
    }
