"""Granite 3 and 4, dense: a Llama with four multipliers."""

from dataclasses import replace

from torch import Tensor

from vllm.config import ModelArch
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderLayer,
    DecoderOptions,
    LayerSpec,
    add_norm,
    llama_options,
)
from vllm.ops.attention_options import AttentionOptions


class GraniteLayer(DecoderLayer):
    """A layer that scales the outputs of attention and MLP before adding them to the residual
    stream.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.scale = self.residual_scale(spec.arch)

    def residual_scale(self, arch: ModelArch) -> float:
        """Return the factor on the outputs of attention and MLP."""
        return arch.config_number("residual_multiplier")

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        normed, residual = add_norm(self.input_layernorm, hidden_states, residual)
        attended = self.self_attn(positions, normed) * self.scale
        normed, residual = add_norm(self.post_attention_layernorm, attended, residual)
        return self.mlp(normed) * self.scale, residual


def granite_options(arch: ModelArch) -> DecoderOptions:
    """Return the options of Llama, with Granite's multipliers added."""
    return replace(
        llama_options(arch),
        attention=AttentionOptions(arch.config_number("attention_multiplier")),
        embedding_scale=arch.config_number("embedding_multiplier"),
        logit_scale=1.0 / arch.config_number("logits_scaling"),
    )


class GraniteForCausalLM(DecoderForCausalLM):
    """Granite 3 and 4, dense (IBM 2024, "Granite 3.0 Language Models"); its multipliers follow muP
    (arXiv 2203.03466)."""

    options = staticmethod(granite_options)
    layer_type = GraniteLayer
