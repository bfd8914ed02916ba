"""Nemotron-H and Nemotron 3: each layer is a norm and either a Mamba-2 mixer, attention, MLP or
experts.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from torch import Tensor, nn

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.errors import ConfigError
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.grouped_router import GroupedRouter
from vllm.model_executor.layers.linear import whole_linear
from vllm.model_executor.layers.mamba import Mamba2Mixer, Mamba2Sizes
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import (
    DecoderAttention,
    DecoderForCausalLM,
    DecoderOptions,
    Layer,
    LayerSpec,
    PlainMLP,
    add_norm,
)
from vllm.model_executor.models.deepseek import deepseek_routing
from vllm.model_executor.models.mamba import mamba2_sizes, split_mixer
from vllm.ops.expert_options import SQUARED_RELU_EXPERTS

_ATTENDS = ("attention", "full_attention")


class NemotronHLayer(Layer):
    """A norm and one of: Mamba-2 mixer, attention, MLP, experts. Added to the residual stream."""

    def make_attention(self, spec: LayerSpec) -> nn.Module:
        arch, kinds = spec.arch, spec.arch.layer_kinds
        kind = kinds[spec.index] if spec.index < len(kinds) else None
        if arch.state_layers[spec.index]:
            return Mamba2Mixer(_sizes(arch), spec.tp)
        if kind in _ATTENDS:
            return super().make_attention(spec)
        if kind == "mlp":
            return PlainMLP(_with_act(arch), spec.options.mlp_bias, spec.tp)
        if kind == "moe":
            return NemotronHMixture(_with_act(arch), spec.options.mlp_bias, spec.tp)
        raise ConfigError(
            f"layers_block_type in config.json has {kind!r} for layer {spec.index}; supported: "
            "mamba, attention, mlp, moe"
        )

    def make_mlp(self, spec: LayerSpec) -> nn.Module:
        return nn.Identity()  # a layer that is an MLP has it as `self_attn`

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        normed, residual = add_norm(self.input_layernorm, hidden_states, residual)
        if isinstance(self.self_attn, (Mamba2Mixer, DecoderAttention)):
            return self.self_attn(positions, normed), residual
        return self.self_attn(normed), residual


class NemotronHMixture(nn.Module):
    """Experts without gates of which each token uses a few, and a shared expert that all tokens
    use.

    The routed experts may work on a smaller projection of the token (LatentMoE, NVIDIA 2025).

    Shape: [T, hidden] -> [T, hidden]
    """

    def __init__(self, arch: ModelArch, has_bias: bool, tp: TPGroup) -> None:
        super().__init__()
        if arch.hidden_act != "relu2":
            raise ConfigError(
                f"mlp_hidden_act {arch.hidden_act!r} in config.json is not supported for experts; "
                f"supported: relu2"
            )
        config, hidden = arch.hf_config, arch.hidden_size
        routing = deepseek_routing(arch, default_method="noaux_tc")
        self.gate = GroupedRouter(hidden, routing)
        latent: int | None = None
        if config.get("moe_latent_size") is not None:
            latent = arch.config_size("moe_latent_size")
            self.fc1_latent_proj = whole_linear(hidden, latent, tp, has_bias)
            self.fc2_latent_proj = whole_linear(latent, hidden, tp, has_bias)
        self.has_latent = latent is not None
        size = arch.config_size("moe_intermediate_size")
        self.experts = Experts(
            routing.num_experts, latent or hidden, size, tp, SQUARED_RELU_EXPERTS
        )
        shared_size = arch.config_count("moe_shared_expert_intermediate_size")
        self.shared_experts: PlainMLP | None = None
        if shared_size:
            shared = replace(arch, intermediate_size=shared_size)
            self.shared_experts = PlainMLP(shared, has_bias, tp)

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.gate.choose(x)
        if self.has_latent:
            out = self.fc2_latent_proj(self.experts(self.fc1_latent_proj(x), ids, weights))
        else:
            out = self.experts(x, ids, weights)
        return out if self.shared_experts is None else out + self.shared_experts(x)


class NemotronHForCausalLM(DecoderForCausalLM):
    """Nemotron-H, Nemotron Nano 2 and Nemotron 3 (NVIDIA 2025, arXiv 2504.03624, 2508.14444 and
    2512.20848)."""

    layer_type = NemotronHLayer
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {
        "backbone.embeddings.": "model.embed_tokens.",
        "backbone.norm_f.": "model.norm.",
        "backbone.": "model.",
        "model.embeddings.": "model.embed_tokens.",  # names in transformers 5
        "model.norm_f.": "model.norm.",
    }
    checkpoint_names: ClassVar[Mapping[str, str]] = {".mixer.": ".self_attn."}
    ignored_prefixes: ClassVar[tuple[str, ...]] = ("mtp.",)

    def options(self, arch: ModelArch) -> DecoderOptions:
        return replace(super().options(arch), needs_positions=False)

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Split the fused tensors of mixers and experts, and rename the norms as in other
        decoders.
        """
        name = re.sub(r"^(model\.layers\.\d+)\.norm\.", r"\1.input_layernorm.", name)
        if ".experts." in name:
            return super().convert(name, source)
        return split_mixer(name, source, _sizes(self.arch))


def _with_act(arch: ModelArch) -> ModelArch:
    """Return the architecture with its hidden activation set to the one of MLPs and experts."""
    return replace(arch, hidden_act=arch.hf_config.get("mlp_hidden_act") or "relu2")


def _sizes(arch: ModelArch) -> Mamba2Sizes:
    """Return the dimensions of the mixers."""
    names = {
        "num_heads": "mamba_num_heads",
        "head_dim": "mamba_head_dim",
        "state_size": "ssm_state_size",
    }
    config = {ours: arch.config_size(theirs) for ours, theirs in names.items()}
    activation = arch.hf_config.get("mamba_hidden_act") or "silu"
    in_words_of_mamba = replace(arch, hf_config={**arch.hf_config, **config}, hidden_act=activation)
    return mamba2_sizes(in_words_of_mamba)
