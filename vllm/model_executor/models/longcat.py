"""LongCat-Flash: layers with two latent attentions, two MLPs, and experts parallel to the first
MLP.

Some of the experts have no weights and return their input.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.errors import ConfigError
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.grouped_router import GroupedRouter, Routing
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import DecoderForCausalLM, GatedMLP, LayerSpec, add_norm
from vllm.model_executor.models.deepseek import LatentScales, deepseek_options, latent_attention
from vllm.ops.expert_options import SILU_EXPERTS, RoutingOptions


class LongcatMixture(nn.Module):
    """Experts of which each token uses a few; the last ones have no weights and return their input.

    Shape: [T, hidden] -> [T, hidden]
    """

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__()
        kind = arch.hf_config.get("zero_expert_type") or "identity"
        if kind != "identity":
            raise ConfigError(
                f"zero_expert_type {kind!r} in config.json is not supported; supported: identity"
            )
        self.num_experts = arch.config_size("n_routed_experts")
        count = self.num_experts + arch.config_count("zero_expert_num")
        options = RoutingOptions(
            top_k=arch.config_size("moe_topk"),
            weights="softmax",
            scale=arch.config_number("routed_scaling_factor"),
        )
        self.gate = GroupedRouter(arch.hidden_size, Routing(count, options, has_bias=True))
        self.experts = Experts(
            self.num_experts,
            arch.hidden_size,
            arch.config_size("expert_ffn_hidden_size"),
            tp,
            # Ids beyond num_experts are identity experts and are skipped.
            replace(SILU_EXPERTS, first_expert=0),
        )

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.gate.choose(x)
        share = torch.where(ids < self.num_experts, 0.0, weights).sum(-1, keepdim=True)
        return self.experts(x, ids, weights) + (x * share).to(x.dtype)


class LongcatFlashLayer(nn.Module):
    """A layer that runs attention and an MLP twice, with experts in parallel.

    The experts have the same input as the first MLP; their output is added after the second MLP, so
    that ranks may exchange tokens in the meantime.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        scales, bias = _scales(spec.arch), spec.options.mlp_bias
        self.input_layernorm = nn.ModuleList(spec.new_norm() for _ in range(2))
        self.self_attn = nn.ModuleList(latent_attention(spec, scales) for _ in range(2))
        self.post_attention_layernorm = nn.ModuleList(spec.new_norm() for _ in range(2))
        self.mlps = nn.ModuleList(GatedMLP(spec.arch, bias, spec.tp) for _ in range(2))
        self.mlp = LongcatMixture(spec.arch, spec.tp)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        normed, residual = self._attend(0, positions, hidden_states, residual)
        routed, hidden_states = self.mlp(normed), self.mlps[0](normed)
        normed, residual = self._attend(1, positions, hidden_states, residual)
        return self.mlps[1](normed) + routed, residual

    def _attend(
        self, index: int, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run one of the two attentions; return the input of the MLP after it, and the residual."""
        normed, residual = add_norm(self.input_layernorm[index], hidden_states, residual)
        attended = self.self_attn[index](positions, normed)
        return add_norm(self.post_attention_layernorm[index], attended, residual)


class LongcatFlashForCausalLM(DecoderForCausalLM):
    """LongCat-Flash 560B-A27B, Chat and Thinking (Meituan 2025, arXiv 2509.01322)."""

    options = staticmethod(deepseek_options)
    layer_type = LongcatFlashLayer
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        ".mlp.router.classifier.": ".mlp.gate.",
        ".mlp.router.": ".mlp.gate.",
    }
    ignored_prefixes: ClassVar[tuple[str, ...]] = ("model.mtp.",)
    """Layers that guess further tokens."""

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Skip the unused bias of the router, and tensors of experts that have no weights."""
        if name.endswith(".mlp.gate.bias"):
            return ()
        parts = super().convert(name, source)
        return [(own, part) for own, part in parts if not self._is_unused(own)]

    def _is_unused(self, name: str) -> bool:
        found = _OF_AN_EXPERT.search(name)
        count = self.arch.config_size("n_routed_experts")
        return found is not None and int(found[1]) >= count


_OF_AN_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")


def _scales(arch: ModelArch) -> LatentScales:
    """Return the factors that scale compressed vectors to the length of hidden states."""

    def factor(flag: str, rank: str) -> float:
        is_on = arch.hf_config.get(flag, True)
        return (arch.hidden_size / arch.config_size(rank)) ** 0.5 if is_on else 1.0

    return LatentScales(
        factor("mla_scale_q_lora", "q_lora_rank"), factor("mla_scale_kv_lora", "kv_lora_rank")
    )
