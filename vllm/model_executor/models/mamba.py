"""Mamba and Mamba-2: decoders without attention, in which a layer is a norm and a mixer."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from vllm.config import ModelArch
from vllm.errors import ConfigError
from vllm.model_executor.layers.mamba import Mamba2Mixer, Mamba2Sizes, MambaMixer, MambaSizes
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import (
    DecoderForCausalLM,
    DecoderOptions,
    Layer,
    LayerSpec,
    add_norm,
)
from vllm.model_executor.models.fused_weights import split_features


class MambaLayer(Layer):
    """A norm and a Mamba mixer, added to the residual stream."""

    def make_attention(self, spec: LayerSpec) -> nn.Module:
        return MambaMixer(mamba_sizes(spec.arch), spec.tp)

    def make_mlp(self, spec: LayerSpec) -> nn.Module:
        return nn.Identity()  # a Mamba layer has no MLP

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        normed, residual = add_norm(self.input_layernorm, hidden_states, residual)
        return self.self_attn(positions, normed), residual


class FalconMambaLayer(MambaLayer):
    """A `MambaLayer` whose mixer normalizes time steps, B and C (norms without weights)."""

    def make_attention(self, spec: LayerSpec) -> nn.Module:
        eps = spec.arch.config_number("mixer_rms_eps", 1e-6)
        sizes = replace(mamba_sizes(spec.arch), norm_eps=eps, norms_have_weights=False)
        return MambaMixer(sizes, spec.tp)


class Mamba2Layer(MambaLayer):
    """A `MambaLayer` with the mixer of Mamba-2."""

    def make_attention(self, spec: LayerSpec) -> nn.Module:
        return Mamba2Mixer(mamba2_sizes(spec.arch), spec.tp)


class MambaForCausalLM(DecoderForCausalLM):
    """Mamba (Gu and Dao 2023, arXiv 2312.00752)."""

    layer_type = MambaLayer

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {
        "backbone.embeddings.": "model.embed_tokens.",
        "backbone.embedding.": "model.embed_tokens.",
        "backbone.norm_f.": "model.norm.",
        "backbone.": "model.",
    }
    checkpoint_names: ClassVar[Mapping[str, str]] = {".mixer.": ".self_attn."}

    def options(self, arch: ModelArch) -> DecoderOptions:
        return DecoderOptions(needs_positions=False)

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Split the fused input projection, and rename the norms as in other decoders."""
        name = re.sub(r"^(model\.layers\.\d+)\.norm\.", r"\1.input_layernorm.", name)
        if ".in_proj." not in name:
            return ((name, source),)
        return split_features(name, source, "in_proj", mamba_sizes(self.arch).in_parts)


class FalconMambaForCausalLM(MambaForCausalLM):
    """Falcon Mamba 7B (TII 2024, arXiv 2410.05355)."""

    layer_type = FalconMambaLayer


class Mamba2ForCausalLM(MambaForCausalLM):
    """Mamba-2 (Dao and Gu 2024, arXiv 2405.21060), and Codestral Mamba."""

    layer_type = Mamba2Layer

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Split the fused input projection and convolution, and rename the norms as in other
        decoders.
        """
        name = re.sub(r"^(model\.layers\.\d+)\.norm\.", r"\1.input_layernorm.", name)
        return split_mixer(name, source, mamba2_sizes(self.arch))


def split_mixer(name: str, source: CheckpointTensor, sizes: Mamba2Sizes) -> NamedTensors:
    """Split a fused tensor of a Mamba-2 mixer: its input projection or convolution.

    Return other tensors unchanged.
    """
    for fused, parts in (("in_proj", sizes.in_parts), ("conv1d", sizes.conv_parts)):
        if f".{fused}." in name:
            return split_features(name, source, fused, parts)
    return ((name, source),)


def mamba_sizes(arch: ModelArch) -> MambaSizes:
    """Read the dimensions of a Mamba mixer from config.json, with Mamba's keys."""
    config = arch.hf_config
    rank = config.get("time_step_rank", "auto")
    return MambaSizes(
        hidden_size=arch.hidden_size,
        inner_size=arch.config_count("intermediate_size")
        or arch.hidden_size * arch.config_size("expand"),
        state_size=arch.config_size("state_size"),
        rank=-(-arch.hidden_size // 16) if rank == "auto" else arch.config_size("time_step_rank"),
        kernel=arch.config_size("conv_kernel"),
        has_bias=arch.config_flag("use_bias"),
        has_conv_bias=arch.config_flag("use_conv_bias", True),
        activation=arch.hidden_act,
    )


def mamba2_sizes(arch: ModelArch) -> Mamba2Sizes:
    """Read the dimensions of a Mamba-2 mixer from config.json, with Mamba-2's keys."""
    config = arch.hf_config
    return Mamba2Sizes(
        hidden_size=arch.hidden_size,
        num_heads=arch.config_size("num_heads"),
        head_size=arch.config_size("head_dim"),
        num_groups=arch.config_size("n_groups"),
        state_size=arch.config_size("state_size"),
        kernel=arch.config_size("conv_kernel"),
        has_bias=arch.config_flag("use_bias"),
        has_conv_bias=arch.config_flag("use_conv_bias", True),
        norm_eps=arch.norm_eps,
        time_step_limits=_limits(config),
        activation=arch.hidden_act,
    )


def hybrid_sizes(arch: ModelArch) -> Mamba2Sizes:
    """Read the dimensions of a hybrid's mixers from config.json, with the keys of Bamba and
    Granite.
    """
    config = arch.hf_config
    num_heads = arch.config_size("mamba_n_heads")
    head_size = config.get("mamba_d_head", "auto")
    if head_size in (None, "auto"):
        head_size = arch.config_size("mamba_expand") * arch.hidden_size // num_heads
    else:
        head_size = arch.config_size("mamba_d_head")
    return Mamba2Sizes(
        hidden_size=arch.hidden_size,
        num_heads=num_heads,
        head_size=head_size,
        num_groups=arch.config_size("mamba_n_groups"),
        state_size=arch.config_size("mamba_d_state"),
        kernel=arch.config_size("mamba_d_conv"),
        has_bias=arch.config_flag("mamba_proj_bias"),
        has_conv_bias=arch.config_flag("mamba_conv_bias", True),
        norm_eps=arch.norm_eps,
        time_step_limits=_limits(config),
        activation=arch.hidden_act,
    )


def _limits(config: Mapping[str, Any]) -> tuple[float, float]:
    """Return the smallest and the largest allowed time step.

    Raises:
        ConfigError: the value is not two numbers.
    """
    given = config.get("time_step_limit") or (0.0, float("inf"))
    try:
        low, high = map(float, given)
    except (TypeError, ValueError):
        raise ConfigError(
            f"time_step_limit in config.json must be two numbers, got {given!r}. Correct the file"
        ) from None
    return low, high
