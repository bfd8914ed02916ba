"""The language model of Llama 3.2 Vision: a Llama in which some layers attend to images."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.errors import ConfigError
from vllm.model_executor.layers.cross_attention import CrossAttention
from vllm.model_executor.models.decoder import DecoderForCausalLM, DecoderLayer, LayerSpec, add_norm

_USUAL_LAYERS = (3, 8, 13, 18, 23, 28, 33, 38)


def cross_attention_layers(arch: ModelArch) -> tuple[int, ...]:
    """Return the indices of the layers that attend to images.

    Raises:
        ConfigError: config.json has no list of layer indices.
    """
    key = "cross_attention_layers"
    given = arch.hf_config.get(key)
    given = list(_USUAL_LAYERS) if given is None else given
    is_list = isinstance(given, (list, tuple)) and all(type(index) is int for index in given)
    if not is_list or not all(0 <= index < arch.num_layers for index in given):
        raise ConfigError(
            f"{key} in config.json must be a list of indices of the {arch.num_layers} layers, got "
            f"{given!r}. Correct the file"
        )
    return tuple(given)


class MllamaLayer(DecoderLayer):
    """A Llama layer, or a layer with gated cross-attention to images.

    A cross-attention layer changes nothing for tokens that see no image, as in Meta's code. In
    transformers, the tokens before the first image of a prompt attend to all images, because their
    mask is empty.
    """

    cross_attn_attn_gate: nn.Parameter | None
    """[1]"""
    cross_attn_mlp_gate: nn.Parameter | None
    """[1]"""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        for name in ("cross_attn_attn_gate", "cross_attn_mlp_gate"):
            has_gate = isinstance(self.self_attn, CrossAttention)
            gate = nn.Parameter(torch.empty(1), requires_grad=False) if has_gate else None
            self.register_parameter(name, gate)

    def make_attention(self, spec: LayerSpec) -> nn.Module:
        arch = spec.arch
        if spec.index not in cross_attention_layers(arch):
            return super().make_attention(spec)
        return CrossAttention(
            arch.hidden_size,
            arch.num_heads,
            arch.num_kv_heads,
            arch.head_size,
            spec.tp,
            head_norm=lambda: spec.options.norm(arch, arch.head_size),
        )

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        attention = self.self_attn
        if not isinstance(attention, CrossAttention):
            return super().forward(positions, hidden_states, residual)
        if not attention.is_read:
            return hidden_states, residual
        assert self.cross_attn_attn_gate is not None and self.cross_attn_mlp_gate is not None
        normed, residual = add_norm(self.input_layernorm, hidden_states, residual)
        read = attention(normed) * self.cross_attn_attn_gate.tanh()
        normed, residual = add_norm(self.post_attention_layernorm, read, residual)
        return attention.clear_unseeing(
            self.mlp(normed)
        ) * self.cross_attn_mlp_gate.tanh(), residual


class MllamaForCausalLM(DecoderForCausalLM):
    """The language model of Llama 3.2 11B and 90B Vision (Meta 2024, arXiv 2407.21783)."""

    layer_type = MllamaLayer
    checkpoint_names: ClassVar[Mapping[str, str]] = {".cross_attn.": ".self_attn."}

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        # The embedding table has more rows than the output head, so they cannot be tied, although
        # config.json may say that they are.
        super().__init__(replace(arch, tie_word_embeddings=False), tp)

    def check(self) -> None:
        super().check()
        if self.arch.media_config is not None and self.stage.count > 1:
            raise ConfigError(
                f"pipeline_parallel_size={self.stage.count}: layers that read images must be on "
                f"the stage that encodes them. Use --tensor-parallel-size instead, or send no "
                f"images (--limit-mm-per-prompt image=0)"
            )
