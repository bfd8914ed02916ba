"""Zamba2: decoders of Mamba-2 mixers.

Some layers also get the output of attention and an MLP, whose weights several layers share.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.errors import ConfigError
from vllm.model_executor.layers.linear import ColumnParallelLinear, ParallelLinear, whole_linear
from vllm.model_executor.layers.mamba import Mamba2Mixer, Mamba2Sizes
from vllm.model_executor.layers.norm import RMSNorm
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.models.decoder import (
    Decoder,
    DecoderAttention,
    DecoderForCausalLM,
    DecoderOptions,
    GatedMLP,
    Layer,
    LayerFactory,
    LayerSpec,
    add_norm,
)
from vllm.model_executor.models.fused_weights import split_features
from vllm.model_executor.models.mamba import mamba2_sizes, split_mixer
from vllm.ops.attention_options import AttentionOptions

_MIXER_NORM_EPS = 1e-5
"""Epsilon of the norms in mixers; config.json gives the epsilon of the other norms."""


class LowRankAdapter(nn.Module):
    """A low-rank matmul that a layer adds to a matmul with shared weights.

    Shape: [T, input_size] -> [T, sum(sizes) / ranks]
    """

    def __init__(self, input_size: int, rank: int, sizes: Mapping[str, int], tp: TPGroup) -> None:
        super().__init__()
        self.first = whole_linear(input_size, rank, tp)
        self.second = ColumnParallelLinear(rank, sizes, tp)
        self.first.keeps_precision = self.second.keeps_precision = True

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class SharedAttention(DecoderAttention):
    """Attention over concatenated hidden states and embeddings, with projections that layers share.

    Each layer has its own KV cache, and may have low-rank adapters of query, key and value.
    """

    def __init__(self, spec: LayerSpec) -> None:
        arch, hidden = spec.arch, spec.arch.hidden_size
        super().__init__(arch, spec.options, None, spec.rotary_emb, spec.tp, 2 * hidden)
        self.adapters: nn.ModuleDict | None = None
        if arch.config_flag("use_shared_attention_adapter"):
            rank, size = arch.config_size("adapter_rank"), arch.num_heads * arch.head_size
            self.adapters = nn.ModuleDict(
                {part: LowRankAdapter(2 * hidden, rank, {"": size}, spec.tp) for part in "qkv"}
            )

    def project(self, hidden_states: Tensor) -> list[Tensor]:
        projected = super().project(hidden_states)
        if self.adapters is None:
            return projected
        pairs = zip(projected, self.adapters.values(), strict=True)
        return [x + adapter(hidden_states).view_as(x) for x, adapter in pairs]

    def share(self, other: "SharedAttention") -> None:
        """Use the projections of another layer instead of own ones."""
        self.qkv_proj, self.o_proj = other.qkv_proj, other.o_proj


class SharedMLP(GatedMLP):
    """A gated MLP that several layers share, with a per-layer adapter of gate and up projection.

    Shape: [T, hidden] -> [T, hidden]
    """

    def __init__(self, spec: LayerSpec) -> None:
        arch, size = spec.arch, spec.arch.intermediate_size
        super().__init__(arch, spec.options.mlp_bias, spec.tp)
        sizes = {"gate_proj": size, "up_proj": size}
        rank = arch.config_size("adapter_rank")
        self.adapter = LowRankAdapter(arch.hidden_size, rank, sizes, spec.tp)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_up_proj(x) + self.adapter(x)))

    def share(self, other: "SharedMLP") -> None:
        """Use the projections of another layer instead of own ones."""
        self.gate_up_proj, self.down_proj = other.gate_up_proj, other.down_proj


class SharedBlock(nn.Module):
    """Shared attention and MLP without residuals, and an output projection of the layer itself.

    Shape: positions [T], hidden_states and embedded [T, hidden] -> [T, hidden]
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        hidden = spec.arch.hidden_size
        self.input_layernorm = RMSNorm(2 * hidden, spec.arch.norm_eps)
        self.self_attn = SharedAttention(spec)
        self.pre_ff_layernorm = spec.new_norm()
        self.mlp = SharedMLP(spec)
        self.linear = whole_linear(hidden, hidden, spec.tp)
        for layer in (
            *(self.self_attn.qkv_proj, self.self_attn.o_proj),
            *(self.mlp.gate_up_proj, self.mlp.down_proj),
        ):
            assert isinstance(layer, ParallelLinear)
            layer.is_shared = True

    def share(self, other: "SharedBlock") -> None:
        """Use the weights of another layer, except adapters and the output projection."""
        self.input_layernorm, self.pre_ff_layernorm = other.input_layernorm, other.pre_ff_layernorm
        self.self_attn.share(other.self_attn)
        self.mlp.share(other.mlp)

    def forward(self, positions: Tensor, hidden_states: Tensor, embedded: Tensor) -> Tensor:
        both = self.input_layernorm(torch.cat((hidden_states, embedded), dim=-1))
        attended = self.self_attn(positions, both)
        return self.linear(self.mlp(self.pre_ff_layernorm(attended)))


class Zamba2Layer(Layer):
    """A norm and a Mamba-2 mixer, added to the residual stream.

    In some layers the norm gets the sum of the residual stream and the output of a `SharedBlock`.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        is_hybrid = spec.index in hybrid_layers(spec.arch)
        self.block = SharedBlock(spec) if is_hybrid else None

    def make_attention(self, spec: LayerSpec) -> nn.Module:
        return Mamba2Mixer(_sizes(spec.arch), spec.tp)

    def make_mlp(self, spec: LayerSpec) -> nn.Module:
        return nn.Identity()  # an MLP is a part of the shared block

    def forward(  # type: ignore[override]
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None, embedded: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the layer; see `Layer.forward`.

        `embedded` [T, hidden] are the embeddings of the tokens.
        """
        if self.block is None:
            normed, residual = add_norm(self.input_layernorm, hidden_states, residual)
        else:
            residual = hidden_states if residual is None else residual + hidden_states
            normed = self.input_layernorm(residual + self.block(positions, residual, embedded))
        return self.self_attn(positions, normed), residual


class Zamba2Decoder(Decoder):
    """A `Decoder` whose layers also get the token embeddings."""

    def __init__(
        self, arch: ModelArch, options: DecoderOptions, make_layer: LayerFactory, tp: TPGroup
    ) -> None:
        super().__init__(arch, options, make_layer, tp)
        layers: Any = self.layers
        indices, num_blocks = hybrid_layers(arch), arch.config_size("num_mem_blocks")
        for count, index in enumerate(indices[num_blocks:]):
            layers[index].block.share(layers[indices[count % num_blocks]].block)

    def run_layers(self, hidden_states: Tensor, positions: Tensor, first: int, end: int) -> Tensor:
        """Run all layers; see `CausalLM.run_layers`.

        Raises:
            ConfigError: only some layers are to run.
        """
        self.check_whole(first, end)
        embedded, residual = hidden_states, None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual, embedded)
        return add_norm(self.norm, hidden_states, residual)[0]


class Zamba2ForCausalLM(DecoderForCausalLM):
    """Zamba2 1.2B, 2.7B and 7B (Zyphra 2024, arXiv 2411.15242). Some mixers also get the output of
    one or two blocks of attention and MLP. These layers share the block's weights, and each changes
    them by low-rank adapters.
    """

    layer_type = Zamba2Layer
    decoder_type: ClassVar[type[Decoder]] = Zamba2Decoder
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        ".mamba_decoder.": ".",
        ".mamba.": ".self_attn.",
        ".shared_transformer.": ".block.",
        ".linear.": ".block.linear.",
        ".feed_forward.": ".mlp.",
        "model.final_layernorm.": "model.norm.",
    }

    def options(self, arch: ModelArch) -> DecoderOptions:
        if arch.config_flag("use_long_context"):
            raise ConfigError(
                f"use_long_context in config.json must be false for {arch.architecture}, got true: "
                f"rotations for longer texts are not supported. Set it to false"
            )
        return DecoderOptions(
            attention=AttentionOptions((arch.head_size / 2) ** -0.5),
            mlp_bias=arch.config_flag("add_bias_linear"),
            needs_positions=False,
        )

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Split fused tensors, and assign adapters to their layers.

        The copies of a shared block in later layers are skipped.
        """
        found = _OF_A_BLOCK.fullmatch(name)
        if found is None:
            return split_mixer(name, source, _sizes(self.arch))
        indices, index, own = hybrid_layers(self.arch), int(found[1]), found[2]
        if index in indices[self.arch.config_size("num_mem_blocks") :]:
            return ()
        adapter = _ADAPTER.fullmatch(own)
        if adapter is not None and int(adapter[2]) < len(indices):
            part, count, place = adapter.groups()
            own = {
                "gate_up_proj": "mlp.adapter.",
                **{f"linear_{x}": f"self_attn.adapters.{x}." for x in "qkv"},
            }[part] + ("first.weight", "second.weight")[int(place)]
            index = indices[int(count)]
        name, size = f"model.layers.{index}.block.{own}", self.arch.intermediate_size
        parts = {"gate_proj": size, "up_proj": size}
        if own == "mlp.adapter.second.weight":
            return split_features(name, source, "second", parts)
        if own.startswith("mlp.gate_up_proj."):
            return split_features(name, source, "gate_up_proj", parts)
        return ((name, source),)


_OF_A_BLOCK = re.compile(r"model\.layers\.(\d+)\.block\.((?!linear\.).+)")
_ADAPTER = re.compile(
    r"(?:self_attn|mlp)\.(linear_[qkv]|gate_up_proj)_adapter_list\.(\d+)\.([01])\.weight"
)


def hybrid_layers(arch: ModelArch) -> list[int]:
    """Return the indices of the layers with attention and an MLP."""
    kinds = arch.layer_kinds[: arch.num_layers]
    return [index for index, kind in enumerate(kinds) if kind == "hybrid"]


def _sizes(arch: ModelArch) -> Mamba2Sizes:
    """Return the dimensions of the mixers."""
    names = {
        "num_heads": "n_mamba_heads",
        "n_groups": "mamba_ngroups",
        "state_size": "mamba_d_state",
        "conv_kernel": "mamba_d_conv",
    }
    config: dict[str, Any] = {ours: arch.config_size(theirs) for ours, theirs in names.items()}
    config["head_dim"] = arch.config_size("mamba_expand") * arch.hidden_size // config["num_heads"]
    config["use_bias"] = arch.config_flag("add_bias_linear")
    config["time_step_limit"] = (arch.config_number("time_step_min", 0.0), float("inf"))
    in_words_of_mamba = replace(arch, hf_config=config, hidden_act="silu", norm_eps=_MIXER_NORM_EPS)
    return mamba2_sizes(in_words_of_mamba)
