"""EXAONE 3 to 4."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from vllm.config import ModelArch
from vllm.model_executor.models.decoder import (
    DecoderAttention,
    DecoderForCausalLM,
    DecoderOptions,
    rms_norm,
)
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.olmo import Olmo2Layer


class ExaoneForCausalLM(LlamaForCausalLM):
    """EXAONE 3, 3.5 and Deep (LG AI Research 2024, arXiv 2408.03541): a Llama with other tensor
    names.
    """

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {
        "transformer.wte.": "model.embed_tokens.",
        "transformer.ln_f.": "model.norm.",
        "transformer.h.": "model.layers.",
    }
    checkpoint_names: ClassVar[dict[str, str]] = {
        ".attn.attention.": ".self_attn.",
        ".self_attn.out_proj.": ".self_attn.o_proj.",
        ".ln_1.": ".input_layernorm.",
        ".ln_2.": ".post_attention_layernorm.",
        ".mlp.c_fc_0.": ".mlp.gate_proj.",
        ".mlp.c_fc_1.": ".mlp.up_proj.",
        ".mlp.c_proj.": ".mlp.down_proj.",
    }
    ignored_tensors = ("rotary.inv_freq", "rotary_emb.inv_freq")


class Exaone4Layer(Olmo2Layer):
    """An `Olmo2Layer` with a norm over each head instead of over all heads."""

    attention_type = DecoderAttention


class Exaone4ForCausalLM(DecoderForCausalLM):
    """EXAONE 4 (LG AI Research 2025, arXiv 2507.11407). In the 32B model three of four layers have
    a sliding window; the others have no rotary positions.
    """

    layer_type = Exaone4Layer

    def options(self, arch: ModelArch) -> DecoderOptions:
        return replace(super().options(arch), head_norm=rms_norm)
