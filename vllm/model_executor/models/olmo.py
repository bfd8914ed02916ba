"""OLMo 1 to 3."""

from dataclasses import replace

from torch import Tensor, nn

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.errors import ConfigError
from vllm.model_executor.layers.norm import LayerNorm, RMSNorm
from vllm.model_executor.layers.rotary import RotaryEmbedding
from vllm.model_executor.models.decoder import (
    DecoderAttention,
    DecoderForCausalLM,
    DecoderLayer,
    DecoderOptions,
    Layer,
    LayerSpec,
)
from vllm.model_executor.models.llama import llama_options
from vllm.model_executor.models.mixture import Mixture, mixture_options


class OlmoForCausalLM(DecoderForCausalLM):
    """OLMo 1 (Groeneveld et al. 2024, arXiv 2402.00838): a Llama whose layer norms have no
    weights."""

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        options = replace(
            llama_options(arch),
            norm=lambda arch, size: LayerNorm(size, has_weight=False),
            qkv_limit=arch.hf_config.get("clip_qkv"),
        )
        super().__init__(arch, tp, options)


class Olmo2Attention(DecoderAttention):
    """Query and key are normed over all heads together, before the rotation."""

    def __init__(
        self,
        arch: ModelArch,
        options: DecoderOptions,
        window: int | None,
        rotary_emb: RotaryEmbedding | None,
        tp: TPGroup,
    ) -> None:
        if tp.size > 1:
            raise ConfigError(
                f"{arch.architecture} cannot be split over {tp.size} ranks: its norms need all "
                f"heads. Set tensor_parallel_size=1"
            )
        super().__init__(arch, options, window, rotary_emb, tp)
        self.q_norm = RMSNorm(arch.num_heads * arch.head_size, arch.norm_eps)
        self.k_norm = RMSNorm(arch.num_kv_heads * arch.head_size, arch.norm_eps)

    def normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        assert self.q_norm is not None and self.k_norm is not None
        q = self.q_norm(query.flatten(1)).unflatten(-1, (-1, self.head_size))
        k = self.k_norm(key.flatten(1)).unflatten(-1, (-1, self.head_size))
        return q, k


class Olmo2Layer(Layer):
    """Norms are behind attention and MLP, and none before."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        del self.input_layernorm
        self.post_attention_layernorm = spec.new_norm()
        self.post_feedforward_layernorm = spec.new_norm()

    def make_attention(self, spec: LayerSpec) -> Olmo2Attention:
        return Olmo2Attention(spec.arch, spec.options, spec.window, spec.rotary_emb, spec.tp)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        x = hidden_states
        x = x + self.post_attention_layernorm(self.self_attn(positions, x))
        return x + self.post_feedforward_layernorm(self.mlp(x)), None


class Olmo2ForCausalLM(DecoderForCausalLM):
    """OLMo 2 (arXiv 2501.00656)."""

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp, llama_options(arch), Olmo2Layer)


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """OLMo 3: most layers have a window."""


class OlmoeLayer(DecoderLayer):
    """A `DecoderLayer` of experts, whose query and key are normed as in OLMo 2."""

    make_attention = Olmo2Layer.make_attention

    def make_mlp(self, spec: LayerSpec) -> nn.Module:
        return Mixture(spec.arch, mixture_options(spec.arch), spec.tp)


class OlmoeForCausalLM(DecoderForCausalLM):
    """OLMoE 1B-7B (Muennighoff et al. 2024, arXiv 2409.02060)."""

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        options = replace(llama_options(arch), qkv_limit=arch.hf_config.get("clip_qkv"))
        super().__init__(arch, tp, options, OlmoeLayer)
