"""GPT-2 and other decoders with layer norms and MLPs without a gate: BLOOM, Falcon, GPT BigCode,
GPT-J, GPT-NeoX, MPT, Nemotron and StarCoder 2.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.errors import ConfigError
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderLayer,
    DecoderOptions,
    LayerSpec,
    ParallelLayer,
    ParallelLayerOfTwoNorms,
    layer_norm,
    layer_norm_without_bias,
)
from vllm.model_executor.models.fused_weights import (
    FusedLayers,
    add_one_to_norms,
    qkv_groups,
    qkv_parts,
    split_parts,
)
from vllm.ops.attention_options import AttentionOptions


def gpt_options(has_bias: bool, **others: Any) -> DecoderOptions:
    """Return the decoder options of a GPT whose linear layers all have biases, or none has.

    Args:
        has_bias: whether they have.
        others: further options.
    """
    return DecoderOptions(
        norm=layer_norm,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=has_bias,
        is_gated=False,
        **others,
    )


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
        if arch.config_flag("scale_attn_by_inverse_layer_idx"):
            raise ConfigError(
                f"scale_attn_by_inverse_layer_idx in config.json must be false for "
                f"{arch.architecture}, got true"
            )
        return gpt_options(
            has_bias=True,
            attention=AttentionOptions(
                None if arch.config_flag("scale_attn_weights", True) else 1.0
            ),
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


class GPTNeoXForCausalLM(DecoderForCausalLM):
    """GPT-NeoX 20B, Pythia, Dolly 2 (Black et al. 2022, arXiv 2204.06745)."""

    checkpoint_names: ClassVar[dict[str, str]] = {
        "gpt_neox.embed_in.": "model.embed_tokens.",
        "gpt_neox.layers.": "model.layers.",
        "gpt_neox.final_layer_norm.": "model.norm.",
        "embed_out.": "lm_head.",
        ".attention.query_key_value.": ".self_attn.qkv_proj.",
        ".attention.dense.": ".self_attn.o_proj.",
        ".mlp.dense_h_to_4h.": ".mlp.up_proj.",
        ".mlp.dense_4h_to_h.": ".mlp.down_proj.",
    }
    ignored_tensors: ClassVar[tuple[str, ...]] = (
        *(".attention.bias", ".attention.masked_bias"),
        ".attention.rotary_emb.inv_freq",
    )
    fused_layers: ClassVar[FusedLayers] = {"qkv_proj": qkv_groups}

    def options(self, arch: ModelArch) -> DecoderOptions:
        has_bias = arch.config_flag("attention_bias", True)
        return DecoderOptions(
            norm=layer_norm, qkv_bias=has_bias, output_bias=has_bias, mlp_bias=True, is_gated=False
        )

    def make_layer(self, spec: LayerSpec) -> nn.Module:
        is_parallel = spec.arch.config_flag("use_parallel_residual", True)
        return ParallelLayerOfTwoNorms(spec) if is_parallel else DecoderLayer(spec)


class GPTJForCausalLM(DecoderForCausalLM):
    """GPT-J 6B (Wang and Komatsuzaki 2021)."""

    layer_type = ParallelLayer
    checkpoint_names: ClassVar[dict[str, str]] = {
        "transformer.wte.": "model.embed_tokens.",
        "transformer.h.": "model.layers.",
        "transformer.ln_f.": "model.norm.",
        ".ln_1.": ".input_layernorm.",
        ".attn.out_proj.": ".self_attn.o_proj.",
        ".attn.": ".self_attn.",
        ".mlp.fc_in.": ".mlp.up_proj.",
        ".mlp.fc_out.": ".mlp.down_proj.",
    }
    ignored_tensors: ClassVar[tuple[str, ...]] = (".attn.bias", ".attn.masked_bias")

    def options(self, arch: ModelArch) -> DecoderOptions:
        return DecoderOptions(
            norm=layer_norm, mlp_bias=True, is_gated=False, is_neox=False, head_bias=True
        )


class Starcoder2ForCausalLM(DecoderForCausalLM):
    """StarCoder2 3B, 7B and 15B (Lozhkov et al. 2024, arXiv 2402.19173)."""

    checkpoint_names: ClassVar[dict[str, str]] = {
        ".mlp.c_fc.": ".mlp.up_proj.",
        ".mlp.c_proj.": ".mlp.down_proj.",
    }

    def options(self, arch: ModelArch) -> DecoderOptions:
        return gpt_options(has_bias=arch.config_flag("use_bias", True))


class NemotronForCausalLM(DecoderForCausalLM):
    """Nemotron-4 15B and 340B, Minitron 4B and 8B (NVIDIA 2024, arXiv 2402.16819, 2406.11704 and
    2407.14679)."""

    def options(self, arch: ModelArch) -> DecoderOptions:
        return replace(super().options(arch), norm=layer_norm, is_gated=False)

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Add 1 to the weights of norms, which the checkpoint stores minus 1."""
        return add_one_to_norms(name, source)


class BloomForCausalLM(DecoderForCausalLM):
    """BLOOM and BLOOMZ (BigScience 2022, arXiv 2211.05100)."""

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {
        f"{level}{name}": ours
        for level in ("transformer.", "")
        for name, ours in {
            "word_embeddings_layernorm.": "model.embed_norm.",
            "word_embeddings.": "model.embed_tokens.",
            "h.": "model.layers.",
            "ln_f.": "model.norm.",
        }.items()
    }
    checkpoint_names: ClassVar[dict[str, str]] = {
        ".self_attention.query_key_value.": ".self_attn.qkv_proj.",
        ".self_attention.dense.": ".self_attn.o_proj.",
        ".mlp.dense_h_to_4h.": ".mlp.up_proj.",
        ".mlp.dense_4h_to_h.": ".mlp.down_proj.",
    }
    fused_layers: ClassVar[FusedLayers] = {"qkv_proj": qkv_groups}

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(replace(arch, hidden_act="gelu_new"), tp)

    def options(self, arch: ModelArch) -> DecoderOptions:
        if arch.config_flag("apply_residual_connection_post_layernorm"):
            raise ConfigError(
                "apply_residual_connection_post_layernorm in config.json must be false for "
                "BloomForCausalLM, got true"
            )
        return gpt_options(has_bias=True, alibi_scale=1.0, has_embedding_norm=True)


class MptForCausalLM(DecoderForCausalLM):
    """MPT 7B and 30B (MosaicML 2023, "Introducing MPT-7B")."""

    checkpoint_names: ClassVar[dict[str, str]] = {
        "transformer.wte.": "model.embed_tokens.",
        "transformer.blocks.": "model.layers.",
        "transformer.norm_f.": "model.norm.",
        ".norm_1.": ".input_layernorm.",
        ".norm_2.": ".post_attention_layernorm.",
        ".attn.Wqkv.": ".self_attn.qkv_proj.",
        ".attn.out_proj.": ".self_attn.o_proj.",
        ".ffn.": ".mlp.",
    }
    fused_layers: ClassVar[FusedLayers] = {"qkv_proj": qkv_parts}

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        size = (arch.config_count("expansion_ratio") or 4) * arch.hidden_size
        super().__init__(replace(arch, hidden_act="gelu", intermediate_size=size), tp)

    def options(self, arch: ModelArch) -> DecoderOptions:
        of_attention = replace(arch, hf_config=arch.hf_config.get("attn_config") or {})
        if arch.num_heads & (arch.num_heads - 1):
            raise ConfigError(
                f"MPTForCausalLM with ALiBi must have a power of two heads, got {arch.num_heads}"
            )
        if not of_attention.config_flag("alibi", True) or of_attention.config_flag("qk_ln"):
            raise ConfigError(
                "MPTForCausalLM needs attn_config in config.json with alibi true, and qk_ln "
                "false or missing"
            )
        return DecoderOptions(
            norm=layer_norm_without_bias,
            is_gated=False,
            alibi_scale=1.0,
            attention=AttentionOptions(of_attention.config_number("softmax_scale", 0.0) or None),
            qkv_limit=of_attention.config_number("clip_qkv", 0.0) or None,
        )


class FalconForCausalLM(DecoderForCausalLM):
    """Falcon 7B, 11B, 40B, 180B, and RW with ALiBi (Almazrouei et al. 2023, arXiv 2311.16867)."""

    checkpoint_names: ClassVar[dict[str, str]] = {
        "transformer.word_embeddings.": "model.embed_tokens.",
        "transformer.h.": "model.layers.",
        "transformer.ln_f.": "model.norm.",
        ".ln_attn.": ".input_layernorm.",
        ".ln_mlp.": ".post_attention_layernorm.",
        ".self_attention.query_key_value.": ".self_attn.qkv_proj.",
        ".self_attention.dense.": ".self_attn.o_proj.",
        ".mlp.dense_h_to_4h.": ".mlp.up_proj.",
        ".mlp.dense_4h_to_h.": ".mlp.down_proj.",
    }
    fused_layers: ClassVar[FusedLayers] = {"qkv_proj": qkv_groups}

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        config = arch.hf_config
        if arch.config_flag("alibi"):
            arch = replace(arch, layer_ropes=(None,) * arch.num_layers)
        super().__init__(replace(arch, hidden_act=config.get("activation") or "gelu"), tp)

    def options(self, arch: ModelArch) -> DecoderOptions:
        return gpt_options(
            has_bias=arch.config_flag("bias"),
            # Falcon adds the ALiBi bias before it scales the scores.
            alibi_scale=arch.head_size**-0.5 if arch.config_flag("alibi") else 0.0,
        )

    def make_layer(self, spec: LayerSpec) -> nn.Module:
        config = spec.arch.hf_config
        if spec.arch.config_flag("new_decoder_architecture"):
            num_norms = config.get("num_ln_in_parallel_attn") or 2
            return ParallelLayerOfTwoNorms(spec) if num_norms == 2 else ParallelLayer(spec)
        return (
            ParallelLayer(spec)
            if spec.arch.config_flag("parallel_attn", True)
            else DecoderLayer(spec)
        )
