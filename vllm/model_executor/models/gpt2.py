"""GPT-2, and GPT BigCode (StarCoder, Granite 20B and 34B Code): learned positions, plain MLPs."""

from collections.abc import Mapping
from typing import ClassVar

from vllm.config import ModelArch
from vllm.errors import ConfigError
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import DecoderForCausalLM, DecoderOptions, layer_norm
from vllm.model_executor.models.fused_weights import (
    qkv_groups,
    qkv_parts,
    split_parts,
)
from vllm.ops.attention_options import AttentionOptions

_LEVELS = {
    "wte.": "model.embed_tokens.",
    "wpe.": "model.embed_positions.",
    "h.": "model.layers.",
    "ln_f.": "model.norm.",
}


class GPT2LMHeadModel(DecoderForCausalLM):
    """GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners")."""

    # The first checkpoints lack the level `transformer`.
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {
        f"{level}{name}": ours for level in ("transformer.", "") for name, ours in _LEVELS.items()
    }
    checkpoint_names: ClassVar[dict[str, str]] = {
        ".ln_1.": ".input_layernorm.",
        ".ln_2.": ".post_attention_layernorm.",
        ".attn.c_attn.": ".self_attn.qkv_proj.",
        ".attn.c_proj.": ".self_attn.o_proj.",
        ".mlp.c_fc.": ".mlp.up_proj.",
        ".mlp.c_proj.": ".mlp.down_proj.",
    }
    ignored_tensors: ClassVar[tuple[str, ...]] = (".attn.bias", ".attn.masked_bias")

    def options(self, arch: ModelArch) -> DecoderOptions:
        config = arch.hf_config
        if config.get("scale_attn_by_inverse_layer_idx"):
            raise ConfigError(
                f"scale_attn_by_inverse_layer_idx in config.json must be false for "
                f"{arch.architecture}, got true"
            )
        return DecoderOptions(
            norm=layer_norm,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            is_gated=False,
            attention=AttentionOptions(None if config.get("scale_attn_weights", True) else 1.0),
            num_learned_positions=arch.max_position_embeddings,
        )

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Transpose dense weights, and split fused query, key and value tensors.

        Quantized tensors are not stored transposed.
        """
        is_weight = name.startswith("model.layers.") and name.endswith(".weight")
        if is_weight and len(source.shape) == 2:
            source = source.mapped(lambda weight: weight.T)
        if ".qkv_proj." in name:
            return split_parts(name, source, "qkv_proj", qkv_parts(self.arch))
        return ((name, source),)


class GPTBigCodeForCausalLM(GPT2LMHeadModel):
    """StarCoder, Granite 20B and 34B Code (Li et al. 2023, arXiv 2305.06161). A GPT-2 with one
    key/value head for all queries.
    """

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Split a fused query, key and value tensor.

        Without multi-query attention it is stored head by head.
        """
        if ".qkv_proj." not in name:
            return ((name, source),)
        parts = qkv_parts(self.arch) if self.arch.num_kv_heads == 1 else qkv_groups(self.arch)
        return split_parts(name, source, "qkv_proj", parts)
