"""DeciLM and Llama Nemotron: Llamas whose layers have different parts, chosen by a search."""

from dataclasses import replace

from torch import Tensor, nn

from vllm.model_executor.models.decoder import DecoderForCausalLM, DecoderLayer, LayerSpec, add_norm

_FLAGS = ("layers_with_attention", "layers_with_mlp")
_SIZES = "layer_intermediate_sizes"


class DeciLMLayer(DecoderLayer):
    """A Llama layer that may lack attention, the MLP, or both, together with the norms
    before them.
    """

    def __init__(self, spec: LayerSpec) -> None:
        keys = (*_FLAGS, _SIZES)
        of_layer = spec.arch.with_values_of_layer(spec.index, *keys)
        self.attends, self.has_mlp = (of_layer.config_flag(key, True) for key in _FLAGS)
        if _SIZES in of_layer.hf_config:
            size = of_layer.config_size(_SIZES)
            spec = replace(spec, arch=replace(spec.arch, intermediate_size=size))
        super().__init__(spec)
        if not self.attends:
            self.input_layernorm = nn.Identity()
        if not self.has_mlp:
            self.post_attention_layernorm = nn.Identity()

    def make_attention(self, spec: LayerSpec) -> nn.Module:
        return super().make_attention(spec) if self.attends else nn.Identity()

    def make_mlp(self, spec: LayerSpec) -> nn.Module:
        return super().make_mlp(spec) if self.has_mlp else nn.Identity()

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.attends:
            normed, residual = add_norm(self.input_layernorm, hidden_states, residual)
            hidden_states = self.self_attn(positions, normed)
        if self.has_mlp:
            normed, residual = add_norm(self.post_attention_layernorm, hidden_states, residual)
            hidden_states = self.mlp(normed)
        return hidden_states, residual


class DeciLMForCausalLM(DecoderForCausalLM):
    """DeciLM 7B and Llama Nemotron Super 49B and Ultra 253B (NVIDIA 2025, arXiv 2411.19146 and
    2505.00949)."""

    layer_type = DeciLMLayer
