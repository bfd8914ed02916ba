"""Gemma 3n, text only."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import ClassVar

import torch
from torch import Tensor, nn

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.errors import ConfigError
from vllm.model_executor.layers.linear import dense_linear, whole_linear
from vllm.model_executor.layers.norm import RMSNorm
from vllm.model_executor.models.decoder import (
    DecoderOptions,
    GatedMLP,
    Layer,
    LayerFactory,
    LayerSpec,
    add_norm,
)
from vllm.model_executor.models.gemma4 import (
    FeatureGate,
    Gemma4Decoder,
    Gemma4ForCausalLM,
    KeyAndValue,
    SharingAttention,
)

_MIN_SQUARE = 1e-5
"""The least mean of squares by which a stream is scaled."""


class SparseMLP(GatedMLP):
    """A `GatedMLP` with sparse gates: of each token only the largest gates are not zero.

    A threshold, some standard deviations above the mean, is subtracted from the gates.

    Args:
        arch: architecture of the layer.
        sparsity: fraction of the gates that become zero if they are normally distributed.
        tp: the ranks that share it.
    """

    multiplier: Tensor
    """Standard deviations between mean and limit."""

    def __init__(self, arch: ModelArch, sparsity: float, tp: TPGroup) -> None:
        super().__init__(arch, False, tp)
        self.tp, self.num_gates = tp, arch.intermediate_size
        multiplier = torch.tensor(NormalDist().inv_cdf(sparsity), device="cpu")
        multiplier = multiplier.to(torch.get_default_dtype())
        self.register_buffer("multiplier", multiplier, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        mean = self._mean(gate)
        deviation = self._mean((gate.float() - mean.float()).square()).sqrt().to(x.dtype)
        gate = torch.relu(gate - (mean + deviation * self.multiplier))
        return self.down_proj(self.act(torch.cat((gate, up), dim=-1)))

    def _mean(self, x: Tensor) -> Tensor:
        """Compute the mean over the features of all ranks, [T, 1] in the dtype of x."""
        total = x.float().sum(-1, keepdim=True)
        return (self.tp.all_reduce(total) / self.num_gates).to(x.dtype)


class AlternatingUpdates(nn.Module):
    """Keeps several streams of hidden states; a layer runs one and predicts the others (AltUp).

    Baykal et al. 2023, arXiv 2301.13310. N streams; H hidden size.
    """

    correct_output_scale: nn.Parameter
    """[H]"""

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__()
        _config, size = arch.hf_config, arch.hidden_size
        count = arch.config_size("altup_num_inputs")
        self.count, self.hidden_size = count, size
        self.active = arch.config_count("altup_active_idx")
        if self.active >= count:
            raise ConfigError(
                f"altup_active_idx in config.json must be less than altup_num_inputs ({count}), "
                f"got {self.active}. Correct the file"
            )
        self.scales_output = arch.config_flag("altup_correct_scale", True)
        self.correct_output_scale = nn.Parameter(torch.empty(size), requires_grad=False)
        self.correction_coefs = dense_linear(count, count, tp)
        self.prediction_coefs = dense_linear(count, count * count, tp)
        self.modality_router = dense_linear(size, count, tp)
        self.router_norm = RMSNorm(size, arch.norm_eps)

    def predict(self, streams: Tensor) -> Tensor:
        """Predict the streams [N, T, H] after the layer, from the streams before it."""
        mixed = self.prediction_coefs(self._modalities(streams[self.active]))
        mixed = mixed.unflatten(-1, (self.count, self.count)).transpose(1, 2)
        predicted = torch.matmul(streams.permute(1, 2, 0), mixed).permute(2, 0, 1)
        return (predicted + streams).contiguous()

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """Correct the predicted streams by the result of the layer: [N, T, H].

        Args:
            predicted: [N, T, H]
            computed: [T, H], output of the layer for the active stream.
        """
        shares = self.correction_coefs(self._modalities(computed)) + 1.0
        error = computed - predicted[self.active]
        return error * shares.T[:, :, None] + predicted

    def active_of(self, streams: Tensor) -> Tensor:
        """Return the active stream [T, H], scaled if the model does so.

        It is the input of the gate of the per-layer features.
        """
        active = streams[self.active]
        return active * self.correct_output_scale if self.scales_output else active

    def _modalities(self, x: Tensor) -> Tensor:
        routed = self.modality_router(self.router_norm(x) * self.hidden_size**-1.0)
        return torch.tanh(routed.float()).to(x.dtype)


class LowRankResidual(nn.Module):
    """Adds a low-rank matmul to the residual (LAuReL; Menghani et al. 2024, arXiv 2411.07501).

    Shape: [T, hidden] -> [T, hidden]
    """

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__()
        rank = arch.config_size("laurel_rank")
        self.linear_left = whole_linear(arch.hidden_size, rank, tp)
        self.linear_right = whole_linear(rank, arch.hidden_size, tp)
        self.post_laurel_norm = RMSNorm(arch.hidden_size, arch.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.post_laurel_norm(self.linear_right(self.linear_left(x)))


class Gemma3nLayer(Layer):
    """A layer over N streams of hidden states, with per-layer features of tokens."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.post_attention_layernorm = spec.new_norm()
        self.pre_feedforward_layernorm = spec.new_norm()
        self.post_feedforward_layernorm = spec.new_norm()
        self.altup = AlternatingUpdates(spec.arch, spec.tp)
        self.laurel = LowRankResidual(spec.arch, spec.tp)
        self.features = FeatureGate(spec.arch, spec.tp)

    def make_attention(self, spec: LayerSpec) -> nn.Module:
        return SharingAttention(spec, None if spec.source is None else spec.source.self_attn)

    def make_mlp(self, spec: LayerSpec) -> nn.Module:
        keys = ("intermediate_size", "activation_sparsity_pattern")
        arch = spec.arch.with_values_of_layer(spec.index, *keys)
        arch = replace(arch, intermediate_size=arch.config_size("intermediate_size"))
        sparsity = arch.config_number("activation_sparsity_pattern", 0.0)
        if not 0 <= sparsity < 1:
            raise ConfigError(
                "activation_sparsity_pattern in config.json must have fractions of at least 0 "
                f"and below 1, got {sparsity}. Correct the file"
            )
        if sparsity:
            return SparseMLP(arch, sparsity, spec.tp)
        return super().make_mlp(replace(spec, arch=arch))

    def forward(  # type: ignore[override]
        self, positions: Tensor, streams: Tensor, features: Tensor, given: KeyAndValue | None
    ) -> tuple[Tensor, KeyAndValue]:
        """Run the layer.

        It is `Gemma4Layer.forward`, with streams [N, T, hidden] instead of hidden states.
        """
        predicted = self.altup.predict(streams)
        active = predicted[self.altup.active]
        normed = self.input_layernorm(active)
        laurel = self.laurel(normed)
        attended, given = self.self_attn(positions, normed, given)
        x = (active + self.post_attention_layernorm(attended) + laurel) / 2.0**0.5
        normed, x = add_norm(self.pre_feedforward_layernorm, x, None)
        x = x + self.post_feedforward_layernorm(self.mlp(normed))
        streams = self.altup.correct(predicted, x)
        added = self.features(self.altup.active_of(streams), features)
        return torch.cat((streams[:1], streams[1:] + added)), given


class Gemma3nDecoder(Gemma4Decoder):
    """A `Gemma4Decoder` whose layers pass several streams of hidden states."""

    def __init__(
        self, arch: ModelArch, options: DecoderOptions, make_layer: LayerFactory, tp: TPGroup
    ) -> None:
        super().__init__(arch, options, make_layer, tp)
        size, count = arch.hidden_size, arch.config_size("altup_num_inputs") - 1
        self.altup_projections, self.altup_unembed_projections = (
            nn.ModuleList(whole_linear(size, size, tp) for _ in range(count)) for _ in range(2)
        )

    def before_layers(self, hidden_states: Tensor) -> Tensor:
        """Return the streams [N, T, hidden] for the first layer."""
        streams = [project(hidden_states) for project in self.altup_projections]
        return torch.stack(_of_one_length([hidden_states, *streams]))

    def after_layers(self, hidden_states: Tensor) -> Tensor:
        """Average the streams after the last layer: [T, hidden]."""
        first, *others = hidden_states.unbind(0)
        pairs = zip(self.altup_unembed_projections, others, strict=True)
        streams = [project(x) for project, x in pairs]
        return torch.stack(_of_one_length([first, *streams])).mean(dim=0)


def _of_one_length(streams: Sequence[Tensor]) -> list[Tensor]:
    """Scale the vectors of all streams [T, hidden] to the length of the first stream's vectors."""
    first, *others = streams
    length = first.square().mean(dim=-1, keepdim=True).sqrt()
    found = [first]
    for x in others:
        own = x.square().mean(dim=-1, keepdim=True).clamp(min=_MIN_SQUARE).sqrt()
        found.append(x * length / own)
    return found


class Gemma3nForCausalLM(Gemma4ForCausalLM):
    """Gemma 3n E2B and E4B (Google 2025). Several streams of hidden states, sparse MLPs, per-layer
    features of tokens, and layers that read the keys and values of earlier ones.
    """

    # Names of checkpoints saved by transformers 4, which adds this prefix also inside a name.
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {"model.language_model.": "model."}
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        **Gemma4ForCausalLM.checkpoint_names,
        ".per_layer_model.language_model_projection.": ".features.per_layer_model_projection.",
    }
    decoder_type = Gemma3nDecoder
    layer_type = Gemma3nLayer
