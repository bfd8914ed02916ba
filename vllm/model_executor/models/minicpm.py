"""MiniCPM 1 to 4: embeddings, residuals and logits are scaled according to muP (arXiv
2203.03466).
"""

from dataclasses import replace
from math import sqrt

from torch import nn

from vllm.config import ModelArch
from vllm.errors import ConfigError
from vllm.model_executor.models.decoder import DecoderForCausalLM, DecoderOptions, LayerSpec
from vllm.model_executor.models.deepseek import latent_attention
from vllm.model_executor.models.granite import GraniteLayer


class MiniCPMLayer(GraniteLayer):
    """A `GraniteLayer` whose residual scale depends on the number of layers."""

    def residual_scale(self, arch: ModelArch) -> float:
        root = sqrt(arch.num_layers)
        return arch.config_number("scale_depth", root) / root


class MiniCPM3Layer(MiniCPMLayer):
    """A `MiniCPMLayer` with latent attention."""

    def make_attention(self, spec: LayerSpec) -> nn.Module:
        return latent_attention(spec)


def _scaled(arch: ModelArch, options: DecoderOptions) -> DecoderOptions:
    base_size = arch.config_number("dim_model_base", arch.hidden_size)
    return replace(
        options,
        table_scale=arch.config_number("scale_emb"),
        logit_scale=base_size / arch.hidden_size,
    )


class MiniCPMForCausalLM(DecoderForCausalLM):
    """MiniCPM 1B, 2B and 4 (arXiv 2404.06395 and 2506.07900), with full attention. The sparse
    attention of MiniCPM 4 in long texts is not implemented.
    """

    layer_type = MiniCPMLayer

    def options(self, arch: ModelArch) -> DecoderOptions:
        if count := arch.config_count("num_experts"):
            raise ConfigError(
                f"num_experts in config.json must be 0 for {arch.architecture}, got {count}: the "
                f"experts of MiniCPM-MoE are not supported. Use a dense MiniCPM"
            )
        return _scaled(arch, super().options(arch))


class MiniCPM3ForCausalLM(DecoderForCausalLM):
    """MiniCPM 3 (OpenBMB 2024): latent attention, whose rotary pairs join the halves of a head."""

    layer_type = MiniCPM3Layer

    def options(self, arch: ModelArch) -> DecoderOptions:
        return _scaled(arch, DecoderOptions())
