"""The language model of Llama 3.2 Vision: Llama 3.1 with layers of cross-attention between its
own."""

from functools import partial

import torch
from torch import Tensor, nn

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.errors import ConfigError
from vllm.model_executor.layers.cross_attention import CrossAttention
from vllm.model_executor.layers.norm import RMSNorm
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderLayer,
    GatedMLP,
    LayerSpec,
    add_norm,
)
from vllm.model_executor.models.llama import llama_options


class CrossLayer(nn.Module):
    """Cross-attention and an MLP, each after a norm and multiplied with a learned gate.

    It changes only tokens that see an image. In transformers, attention also changes the tokens
    before the first image of a prompt, to which the mask of all images leaves none; Meta's own code
    clears it there, as is done here.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        arch = spec.arch
        self.input_layernorm = spec.new_norm()
        self.cross_attn = CrossAttention(
            arch.hidden_size,
            arch.num_heads,
            arch.num_kv_heads,
            arch.head_size,
            spec.tp,
            head_norm=partial(RMSNorm, arch.head_size, arch.norm_eps),
        )
        self.cross_attn_attn_gate = nn.Parameter(torch.empty(1), requires_grad=False)
        self.post_attention_layernorm = spec.new_norm()
        self.mlp = GatedMLP(arch, spec.options.mlp_bias, spec.tp)
        self.cross_attn_mlp_gate = nn.Parameter(torch.empty(1), requires_grad=False)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if not self.cross_attn.is_read:
            return hidden_states, residual
        normed, residual = add_norm(self.input_layernorm, hidden_states, residual)
        attended = torch.mul(self.cross_attn(normed), self.cross_attn_attn_gate.tanh())
        normed, residual = add_norm(self.post_attention_layernorm, attended, residual)
        changed = self.cross_attn.clear_unseeing(self.mlp(normed))
        return torch.mul(changed, self.cross_attn_mlp_gate.tanh()), residual


class MllamaForCausalLM(DecoderForCausalLM):
    """The language model of Llama 3.2 Vision 11B and 90B (Meta 2024)."""

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        cross_layers = _cross_layers(arch)

        def make_layer(spec: LayerSpec) -> nn.Module:
            return (CrossLayer if spec.index in cross_layers else DecoderLayer)(spec)

        super().__init__(arch, tp, llama_options(arch), make_layer)

    def check(self) -> None:
        super().check()
        if self.media_encoder is not None and self.stage.count > 1:
            raise ConfigError(
                f"pipeline_parallel_size={self.stage.count}: images of Llama 3.2 Vision need all "
                f"layers on the same ranks. Use --tensor-parallel-size, or send no images "
                f"(--limit-mm-per-prompt image=0)"
            )


def _cross_layers(arch: ModelArch) -> list[int]:
    """Return the indices of the layers of cross-attention.

    Raises:
        ConfigError: config.json does not list them.
    """
    found = arch.hf_config.get("cross_attention_layers")
    if not isinstance(found, list) or not all(
        type(index) is int and 0 <= index < arch.num_layers for index in found
    ):
        raise ConfigError(
            f"cross_attention_layers in config.json must be a list of numbers from 0 to "
            f"{arch.num_layers - 1}, got {found!r}"
        )
    return found
