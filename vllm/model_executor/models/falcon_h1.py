"""Falcon-H1: decoders with parallel attention and Mamba-2 mixers in every layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.errors import ConfigError
from vllm.model_executor.layers.mamba import Mamba2Mixer, Mamba2Sizes
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderLayer,
    DecoderOptions,
    GatedMLP,
    LayerSpec,
    add_norm,
)
from vllm.model_executor.models.mamba import hybrid_sizes, split_mixer
from vllm.ops.attention_options import AttentionOptions


class FalconH1Layer(DecoderLayer):
    """Attention and a Mamba-2 mixer on the same normed input, then an MLP.

    The inputs and outputs of all three are multiplied by muP multipliers (arXiv 2203.03466).
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.mamba = Mamba2Mixer(_sizes(spec.arch), spec.tp)

    def make_mlp(self, spec: LayerSpec) -> "FalconH1MLP":
        return FalconH1MLP(spec.arch, spec.options.mlp_bias, spec.tp)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        normed, residual = add_norm(self.input_layernorm, hidden_states, residual)
        mixed = self.mamba(positions, _scaled(normed, self.arch, "ssm_in_multiplier"))
        attended = self.self_attn(positions, _scaled(normed, self.arch, "attention_in_multiplier"))
        both = _scaled(mixed, self.arch, "ssm_out_multiplier")
        both = both + _scaled(attended, self.arch, "attention_out_multiplier")
        normed, residual = add_norm(self.post_attention_layernorm, both, residual)
        return self.mlp(normed), residual


class FalconH1MLP(GatedMLP):
    """Computes down(act(gate(x) * a) * up(x)) * b, with muP multipliers a and b.

    Shape: [T, hidden] -> [T, hidden]
    """

    def __init__(self, arch: ModelArch, bias: bool, tp: TPGroup) -> None:
        super().__init__(arch, bias, tp)
        self.gate_scale, self.out_scale = _multipliers(arch.hf_config, "mlp_multipliers", 2)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        gate_up = torch.cat((gate * self.gate_scale, up), dim=-1)
        return self.down_proj(self.act(gate_up)) * self.out_scale


class FalconH1ForCausalLM(DecoderForCausalLM):
    """Falcon-H1 0.5B to 34B (TII 2025, arXiv 2507.22448)."""

    layer_type = FalconH1Layer
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        ".feed_forward.": ".mlp.",
        ".pre_ff_layernorm.": ".post_attention_layernorm.",
        "model.final_layernorm.": "model.norm.",
    }

    def options(self, arch: ModelArch) -> DecoderOptions:
        # Rotary embedding is linear, so the key multiplier can be a part of the scale of scores.
        scale = arch.config_number("key_multiplier") * arch.head_size**-0.5
        return replace(
            super().options(arch),
            attention=AttentionOptions(scale),
            table_scale=arch.config_number("embedding_multiplier"),
            logit_scale=arch.config_number("lm_head_multiplier"),
        )

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Split the fused tensors of Mamba-2 mixers."""
        return split_mixer(name, source, _sizes(self.arch))


def _sizes(arch: ModelArch) -> Mamba2Sizes:
    """Return the dimensions of the Mamba-2 mixers."""
    config, sizes = arch.hf_config, hybrid_sizes(arch)
    scales = _multipliers(config, "ssm_multipliers", len(sizes.in_parts))
    return replace(
        sizes,
        has_out_bias=arch.config_flag("projectors_bias"),
        has_norm=arch.config_flag("mamba_rms_norm"),
        is_gated_last=arch.config_flag("mamba_norm_before_gate", True),
        in_scales=dict(zip(sizes.in_parts, scales, strict=True)),
    )


def _scaled(x: Tensor, arch: ModelArch, name: str) -> Tensor:
    """Multiply x by the multiplier of this name in config.json."""
    scale = arch.config_number(name)
    return x if scale == 1.0 else x * scale


def _multipliers(config: Mapping[str, Any], name: str, count: int) -> list[float]:
    """Read a list of multipliers from config.json; all 1 if it has none.

    Raises:
        ConfigError: the value is not a list of `count` numbers.
    """
    given = config.get(name) or [1.0] * count
    try:
        found = [float(each) for each in given]
    except (TypeError, ValueError):
        found = []
    if len(found) != count:
        raise ConfigError(
            f"{name} in config.json must be a list of {count} numbers, got "
            f"{given!r}. Correct the file"
        )
    return found
