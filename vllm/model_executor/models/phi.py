"""Phi 1 to 4."""

from collections.abc import Iterable
from typing import ClassVar

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.errors import ConfigError
from vllm.model_executor.layers.slice import CheckpointTensor
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderOptions,
    ParallelLayer,
    layer_norm,
)
from vllm.model_executor.models.fused_weights import qkv_sizes, split_features


class PhiForCausalLM(DecoderForCausalLM):
    """Phi 1, 1.5 and 2 (Li et al. 2023, arXiv 2309.05463)."""

    checkpoint_names: ClassVar[dict[str, str]] = {
        ".self_attn.dense.": ".self_attn.o_proj.",
        ".mlp.fc1.": ".mlp.up_proj.",
        ".mlp.fc2.": ".mlp.down_proj.",
        "model.final_layernorm.": "model.norm.",
    }

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        if arch.hf_config.get("qk_layernorm"):
            raise ConfigError(
                "qk_layernorm in config.json must be false for PhiForCausalLM, got true: this "
                "engine does not normalise queries and keys of this model"
            )
        options = DecoderOptions(
            norm=layer_norm,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            is_gated=False,
            head_bias=True,
        )
        super().__init__(arch, tp, options, ParallelLayer)


class Phi3ForCausalLM(DecoderForCausalLM):
    """Phi 3, 3.5 and 4 (Abdin et al. 2024, arXiv 2404.14219): a Llama with fused checkpoint
    tensors.
    """

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp, DecoderOptions())

    def convert(
        self, name: str, source: CheckpointTensor
    ) -> Iterable[tuple[str, CheckpointTensor]]:
        """Split the fused projections of attention and of the MLP."""
        if ".qkv_proj." in name:
            return split_features(name, source, "qkv_proj", qkv_sizes(self.arch))
        if ".gate_up_proj." in name:
            size = self.arch.intermediate_size
            sizes = {"gate_proj": size, "up_proj": size}
            return split_features(name, source, "gate_up_proj", sizes)
        return ((name, source),)
