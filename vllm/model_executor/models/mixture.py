"""Decoders with a mixture of experts instead of the MLP: Mixtral, Qwen, Phi, Granite and OLMoE."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.model_executor.layers.experts import Experts, Router
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderLayer,
    DecoderOptions,
    GatedMLP,
    LayerSpec,
    layer_norm,
    rms_norm,
)
from vllm.model_executor.models.fused_weights import NUMBERED_MATRICES, experts_in, split_by_expert
from vllm.model_executor.models.granite import GraniteLayer, granite_options
from vllm.ops import get_ops
from vllm.ops.expert_options import SILU_EXPERTS, ExpertOptions, Routing


@dataclass(frozen=True, kw_only=True)
class MixtureOptions:
    """The options in which families with experts differ."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """Intermediate size of one expert."""
    routing: Routing = "softmax_of_chosen"
    """Weight of a chosen expert."""
    tolerance: float = 0.0
    """SparseMixer ignores experts whose logits are further below the chosen one than this fraction
    of the larger magnitude of the two."""
    shared_size: int = 0
    """Intermediate size of an expert that all tokens use; 0: there is none."""
    has_shared_gate: bool = True
    """A gate says how much that expert counts."""
    has_bias: bool = False
    """Whether the router and both matmuls of the experts have biases."""
    experts: ExpertOptions = SILU_EXPERTS
    """Computation of an expert between its matmuls."""


class Mixture(nn.Module):
    """A router, its experts, and optionally a shared expert that all tokens use, which may have a
    gate.

    Shape: [T, hidden] -> [T, hidden]
    """

    def __init__(self, arch: ModelArch, options: MixtureOptions, tp: TPGroup) -> None:
        super().__init__()
        size = arch.hidden_size
        num_experts, bias = options.num_experts, options.has_bias
        self.gate = Router(
            size, num_experts, options.top_k, options.routing, bias, options.tolerance
        )
        self.experts = Experts(
            num_experts, size, options.intermediate_size, tp, options.experts, bias
        )
        self.shared_expert: GatedMLP | None = None
        self.shared_expert_gate: ColumnParallelLinear | None = None
        if options.shared_size:
            shared = replace(arch, intermediate_size=options.shared_size)
            self.shared_expert = GatedMLP(shared, False, tp)
        if options.shared_size and options.has_shared_gate:
            self.shared_expert_gate = ColumnParallelLinear(size, {"": 1}, TPGroup())
            self.shared_expert_gate.keeps_precision = True

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.experts(x, *self.gate.choose(x))
        if self.shared_expert is None:
            return out
        shared = self.shared_expert(x)
        if self.shared_expert_gate is not None:
            shared = get_ops().scale_rows(shared, self.shared_expert_gate(x), is_gate=True)
        return out + shared


def mixture_options(arch: ModelArch) -> MixtureOptions:
    """Read the options from config.json, with the keys of Mixtral, Qwen, OLMoE and Granite."""
    return MixtureOptions(
        num_experts=arch.config_count("num_local_experts") or arch.config_count("num_experts"),
        top_k=arch.config_size("num_experts_per_tok"),
        intermediate_size=arch.config_count("moe_intermediate_size") or arch.intermediate_size,
        routing="softmax_of_chosen" if arch.config_flag("norm_topk_prob", True) else "softmax",
        shared_size=arch.config_count("shared_expert_intermediate_size"),
    )


def make_mixture(self: nn.Module, spec: LayerSpec) -> nn.Module:
    """Make the experts of a layer, as a method `make_mlp` of its class."""
    return Mixture(spec.arch, mixture_options(spec.arch), spec.tp)


class MixtureLayer(DecoderLayer):
    """A `DecoderLayer` with a `Mixture` instead of the MLP, except in layers that config.json
    lists.
    """

    def make_mlp(self, spec: LayerSpec) -> nn.Module:
        step = spec.arch.config_count("decoder_sparse_step") or 1
        without = spec.arch.hf_config.get("mlp_only_layers") or ()
        if spec.index in without or (spec.index + 1) % step:
            return super().make_mlp(spec)
        return Mixture(spec.arch, mixture_options(spec.arch), spec.tp)


class MixtralForCausalLM(DecoderForCausalLM):
    """Mixtral 8x7B and 8x22B (Jiang et al. 2024, arXiv 2401.04088)."""

    layer_type = MixtureLayer
    checkpoint_names: ClassVar[dict[str, str]] = {
        ".block_sparse_moe.": ".mlp.",
        **NUMBERED_MATRICES,
    }


class Qwen2MoeForCausalLM(DecoderForCausalLM):
    """Qwen 1.5 and 2 MoE (arXiv 2407.10671), with a shared expert that all tokens use."""

    layer_type = MixtureLayer

    def options(self, arch: ModelArch) -> DecoderOptions:
        return DecoderOptions(qkv_bias=arch.config_flag("qkv_bias", True))


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Qwen 3 MoE (Yang et al. 2025, arXiv 2505.09388)."""

    layer_type = MixtureLayer

    def options(self, arch: ModelArch) -> DecoderOptions:
        return replace(super().options(arch), head_norm=rms_norm)


class PhimoeLayer(DecoderLayer):
    """A `DecoderLayer` with the sparse-mixer router.

    The weight of a chosen expert is its probability in a softmax over itself and the experts whose
    logits are slightly lower.
    """

    def make_mlp(self, spec: LayerSpec) -> nn.Module:
        jitter = spec.arch.config_number("router_jitter_noise", 0.0)
        options = mixture_options(spec.arch)
        options = replace(options, routing="sparse_mixer", tolerance=2 * jitter)
        return Mixture(spec.arch, options, spec.tp)


class PhimoeForCausalLM(DecoderForCausalLM):
    """Phi-3.5-MoE, Phi-mini-MoE and Phi-tiny-MoE (Abdin et al. 2024, arXiv 2404.14219; Li et al.
    2025, arXiv 2506.18349)."""

    layer_type = PhimoeLayer
    checkpoint_names: ClassVar[dict[str, str]] = {
        **MixtralForCausalLM.checkpoint_names,
        ".mlp.router.": ".mlp.gate.",  # name in transformers 5
    }

    def options(self, arch: ModelArch) -> DecoderOptions:
        return replace(
            super().options(arch),
            norm=layer_norm,
            head_bias=arch.config_flag("lm_head_bias"),
        )


class GraniteMoeLayer(GraniteLayer):
    """A `GraniteLayer` whose MLP is a `Mixture`."""

    make_mlp = make_mixture


class GraniteMoeForCausalLM(DecoderForCausalLM):
    """Granite 3 1B-A400M and 3B-A800M (IBM 2024, "Granite 3.0 Language Models")."""

    options = staticmethod(granite_options)
    layer_type = GraniteMoeLayer
    checkpoint_names: ClassVar[dict[str, str]] = {
        ".block_sparse_moe.": ".mlp.",
        ".router.layer.": ".gate.",
        ".mlp.router.": ".mlp.gate.",  # name in transformers 5
    }

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Split tensors with the weights of all experts."""
        return split_experts(self.arch, name, source)


def split_experts(arch: ModelArch, name: str, source: CheckpointTensor) -> NamedTensors:
    """Split a Granite tensor with the matrices of all experts; return other tensors unchanged."""
    if name.endswith(".input_linear.weight"):
        experts = experts_in(name, source, mixture_options(arch).num_experts)
        size = arch.intermediate_size
        parts = {"gate_proj": (0, size), "up_proj": (size, size)}
        return split_by_expert(name.removesuffix("input_linear.weight"), source, parts, experts)
    if name.endswith(".output_linear.weight"):
        experts = experts_in(name, source, mixture_options(arch).num_experts)
        parts = {"down_proj": (0, arch.hidden_size)}
        return split_by_expert(name.removesuffix("output_linear.weight"), source, parts, experts)
    return ((name, source),)
