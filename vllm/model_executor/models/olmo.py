"""OLMo 1 to 3, and EXAONE 4, which has layers like OLMo 2."""

from dataclasses import replace
from typing import ClassVar

from torch import Tensor, nn

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.model_executor.layers.norm import LayerNorm, SplitRMSNorm
from vllm.model_executor.layers.rotary import RotaryEmbedding
from vllm.model_executor.models.decoder import (
    DecoderAttention,
    DecoderForCausalLM,
    DecoderLayer,
    DecoderOptions,
    Layer,
    LayerSpec,
    rms_norm,
)
from vllm.model_executor.models.mixture import make_mixture


class OlmoForCausalLM(DecoderForCausalLM):
    """OLMo 1 (Groeneveld et al. 2024, arXiv 2402.00838): a Llama whose layer norms have no
    weights."""

    def options(self, arch: ModelArch) -> DecoderOptions:
        return replace(
            super().options(arch),
            norm=lambda arch, size: LayerNorm(size, has_weight=False),
            qkv_limit=arch.config_number("clip_qkv", 0.0) or None,
        )


class Olmo2Attention(DecoderAttention):
    """Attention that norms query and key over all heads together, before the rotary embedding."""

    def __init__(
        self,
        arch: ModelArch,
        options: DecoderOptions,
        window: int | None,
        rotary_emb: RotaryEmbedding | None,
        tp: TPGroup,
    ) -> None:
        super().__init__(arch, options, window, rotary_emb, tp)
        replicas = max(1, tp.size // arch.num_kv_heads)
        size, eps = arch.head_size, arch.norm_eps
        self.q_norm = SplitRMSNorm(arch.num_heads * size, eps, tp)
        self.k_norm = SplitRMSNorm(arch.num_kv_heads * size, eps, tp, replicas)

    def normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(self.q_norm, SplitRMSNorm) and isinstance(self.k_norm, SplitRMSNorm)
        parts = [query.flatten(1), key.flatten(1)]
        q, k = SplitRMSNorm.of_each([self.q_norm, self.k_norm], parts)
        return q.unflatten(-1, (-1, self.head_size)), k.unflatten(-1, (-1, self.head_size))


class Olmo2Layer(Layer):
    """A layer with norms after attention and after the MLP, and none before."""

    attention_type: ClassVar[type[nn.Module]] = Olmo2Attention

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        del self.input_layernorm
        self.post_attention_layernorm = spec.new_norm()
        self.post_feedforward_layernorm = spec.new_norm()

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        x = hidden_states
        x = x + self.post_attention_layernorm(self.self_attn(positions, x))
        return x + self.post_feedforward_layernorm(self.mlp(x)), None


class Olmo2ForCausalLM(DecoderForCausalLM):
    """OLMo 2 (arXiv 2501.00656)."""

    layer_type = Olmo2Layer


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """OLMo 3: an OLMo 2 with a sliding window in most layers."""


class OlmoeLayer(DecoderLayer):
    """A `DecoderLayer` of experts, with query and key normed as in OLMo 2."""

    attention_type = Olmo2Attention
    make_mlp = make_mixture


class OlmoeForCausalLM(DecoderForCausalLM):
    """OLMoE 1B-7B (Muennighoff et al. 2024, arXiv 2409.02060)."""

    layer_type = OlmoeLayer

    def options(self, arch: ModelArch) -> DecoderOptions:
        return replace(super().options(arch), qkv_limit=arch.config_number("clip_qkv", 0.0) or None)


class FlexOlmoLayer(Olmo2Layer):
    """An `Olmo2Layer` with experts instead of the MLP."""

    make_mlp = make_mixture


class FlexOlmoForCausalLM(DecoderForCausalLM):
    """FlexOlmo 7x7B (Shi et al. 2025, arXiv 2507.07024): an OLMo 2 with separately trained
    experts.
    """

    layer_type = FlexOlmoLayer


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
