"""Gated DeltaNet and Kimi Delta Attention: linear-attention layers with a recurrent state.

Each is a convolution over the last tokens, followed by a state that maps keys to values and that
each token corrects.

Independent of batches: `StateLayer` knows which tokens belong to which request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.attention import StateLayer, StateRows, States
from vllm.config.parallel import sizes_that_fit
from vllm.distributed import TPGroup, divide
from vllm.errors import ConfigError
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear, whole_linear
from vllm.model_executor.layers.mamba import Convolution, advance_windows, check_activation
from vllm.model_executor.layers.slice import Slice, SlicedModule
from vllm.ops import get_ops
from vllm.ops.native.delta_rule import DeltaTokens, run_delta_rule
from vllm.ops.native.state_space import TokenStates, time_steps

_LENGTH_EPS = 1e-6
"""Added to the squared length of queries and keys."""


class HeadGatedNorm(nn.Module):
    """Compute norm(x) * weight * act(gate), with one RMS norm for each head.

    Args:
        head_size: D.
        eps: added to the mean of squares.
        act: activation of the gate.

    Shape: x [T, H, D] float32, gate [T, H * D] -> [T, H, D] of the dtype of the gate
    """

    weight: nn.Parameter

    def __init__(self, head_size: int, eps: float, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.eps, self.act = eps, act
        self.weight = nn.Parameter(torch.ones(head_size), requires_grad=False)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        factor = self.act(gate.float()).view(x.shape)
        return (normed * self.weight.float() * factor).to(gate.dtype)


@dataclass(frozen=True, kw_only=True)
class DeltaNetSizes:
    """The dimensions of a Gated DeltaNet, over all ranks."""

    hidden_size: int
    num_key_heads: int
    """Heads of queries and keys; each serves as many heads of values, one after the other."""
    num_value_heads: int
    key_size: int
    """K, the elements of a head of queries or keys."""
    value_size: int
    """V, the elements of a head of values."""
    kernel: int
    """Tokens that the convolution sees."""
    norm_eps: float
    activation: str

    def __post_init__(self) -> None:
        check_activation(self.activation)
        if self.num_value_heads % self.num_key_heads:
            raise ConfigError(
                f"config.json: linear_num_value_heads ({self.num_value_heads}) must be a multiple "
                f"of linear_num_key_heads ({self.num_key_heads}). Correct the file"
            )

    @property
    def heads_per_key(self) -> int:
        """Number of value heads that share one key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def features(self) -> tuple[int, int, int]:
        """Output features of the queries, keys and values, over all heads and ranks."""
        keys = self.num_key_heads * self.key_size
        return keys, keys, self.num_value_heads * self.value_size

    def mixed_parts(self, prefix: str) -> dict[str, int]:
        """Return name -> features for queries, keys and values, in the order of the checkpoint."""
        return dict(zip((f"{prefix}{part}" for part in "qkv"), self.features, strict=True))


def _fits(sizes: DeltaNetSizes, num_ranks: int) -> bool:
    """Return whether the heads can be divided evenly over this number of ranks."""
    keys = sizes.num_key_heads
    keys_fit = keys % num_ranks == 0 or num_ranks % keys == 0
    return keys_fit and sizes.num_value_heads % num_ranks == 0


class DeltaLayer(SlicedModule, StateLayer):
    """Base class of layers with the gated delta rule; subclasses define the projections.

    Args:
        sizes: dimensions over all ranks.
        conv_parts: checkpoint names of the convolution of queries, of keys and of values.
        is_by_key: the decay is a vector over the key elements; False: one scalar for each head.
        tp: the ranks that share the heads. A key head is on one rank, or on several that share its
            value heads.

    Raises:
        ConfigError: the heads cannot be split over the ranks.
    """

    cache_names: ClassVar[tuple[str, ...]] = ("window", "delta_state")

    window: Tensor | None
    """[rows, kernel - 1, channels] the last inputs of the convolution."""
    delta_state: Tensor | None
    """[rows, H, V, K] float32."""
    A_log: nn.Parameter
    """[H] float32"""
    dt_bias: nn.Parameter
    """[H] float32, or with is_by_key [H * K]."""

    def __init__(
        self, sizes: DeltaNetSizes, conv_parts: Sequence[str], is_by_key: bool, tp: TPGroup
    ) -> None:
        super().__init__()
        if not _fits(sizes, tp.size):
            fitting = sizes_that_fit(lambda size: _fits(sizes, size), sizes.num_value_heads)
            raise ConfigError(
                f"tensor_parallel_size ({tp.size}) must divide the {sizes.num_value_heads} value "
                "heads of the model's linear attention, and must divide, or be a multiple of, "
                f"its {sizes.num_key_heads} key heads. {fitting}"
            )
        self.num_replicas = max(1, tp.size // sizes.num_key_heads)
        """Ranks that have the same key heads."""
        query, key, _ = conv_parts
        self.conv1d = Convolution(
            dict(zip(conv_parts, sizes.features, strict=True)),
            sizes.kernel,
            False,
            tp,
            {query: self.num_replicas, key: self.num_replicas},
        )
        self.num_key_heads = divide(sizes.num_key_heads * self.num_replicas, tp.size)
        self.num_heads = divide(sizes.num_value_heads, tp.size)
        self.key_size, self.value_size = sizes.key_size, sizes.value_size
        self.is_by_key = is_by_key
        for name, per_head in (("A_log", 1), ("dt_bias", sizes.key_size if is_by_key else 1)):
            size = self.num_heads * per_head
            numbers = torch.empty(size, dtype=torch.float32)
            self.register_parameter(name, nn.Parameter(numbers, requires_grad=False))
            self.slices[name] = {"": Slice(0, 0, size, sizes.num_value_heads * per_head)}

    def state_shapes(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        conv = self.conv1d
        window = (conv.kernel - 1, conv.num_channels)
        state = (self.num_heads, self.value_size, self.key_size)
        return (window, conv.weight.dtype), (state, torch.float32)

    def input_shapes(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        conv = self.conv1d
        features = (conv.num_channels, self.num_heads, len(self.dt_bias))
        return tuple(((count,), conv.weight.dtype) for count in features)

    def advance(
        self, inputs: tuple[Tensor, ...], lengths: Tensor | None, states: States
    ) -> tuple[Tensor, States]:
        """Run whole sequences with the chunked algorithm.

        Args:
            inputs: inputs of the convolution [B, L, channels], of beta [B, L, H], and of the decay,
                in the shape of `dt_bias`.
            lengths: tokens of each sequence; see `StateLayer.advance`.
            states: convolution windows and recurrent states; see `StateLayer.advance`.
        """
        (mixed, b, a), (window, state) = inputs, states
        mixed, window = self.conv1d(mixed, window, lengths)
        logs, beta = self._gates(a, b, lengths)
        y, state = run_delta_rule(*self._split(mixed), logs, beta, state)
        return y, (window, state)

    def advance_rows(self, inputs: tuple[Tensor, ...], rows: StateRows, caches: States) -> Tensor:
        """Run a few tokens of each sequence, and update the recurrent states in the cache
        in place.
        """
        (mixed, b, a), (windows, states) = inputs, caches
        mixed = advance_windows(self.conv1d, mixed, rows, windows)

        def run(indices: Tensor, is_new: Tensor, *tokens: Tensor) -> Tensor:
            return get_ops().delta_tokens(
                TokenStates(states, indices, is_new), DeltaTokens(*tokens)
            )

        return rows.by_token(run, *self._split(mixed), *self._gates(a, b, rows.lengths))

    def _gates(self, a: Tensor, b: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute the log of the decay of the state, and beta, the rate at which a token corrects
        it.

        Both are [B, L, H]; the decay is [B, L, H, K] if each key element has its own.
        """
        steps, rate = time_steps(a, self.dt_bias, lengths), -self.A_log.exp()
        if self.is_by_key:
            steps, rate = steps.unflatten(-1, (self.num_heads, self.key_size)), rate[:, None]
        beta = b.float().sigmoid()
        if lengths is not None:
            indices = torch.arange(b.shape[1], dtype=lengths.dtype, device=b.device)
            beta = beta * (indices < lengths[:, None])[:, :, None]
        return steps * rate, beta

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the output of the convolution into queries, keys and values of heads.

        Queries and keys [..., G, K] are scaled to length 1, queries also divided by sqrt(K). Values
        are [..., H, V].
        """
        keys = self.num_key_heads * self.key_size
        q, k, v = mixed.split((keys, keys, self.num_heads * self.value_size), dim=-1)
        q, k = (_unit(x.unflatten(-1, (self.num_key_heads, self.key_size))) for x in (q, k))
        return q * self.key_size**-0.5, k, v.unflatten(-1, (self.num_heads, self.value_size))


class GatedDeltaNet(DeltaLayer):
    """Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464), with its heads split over ranks.

    Args:
        sizes: over all ranks.
        tp: the ranks that share the heads.

    Shape: positions [T], hidden_states [T, hidden] -> [T, hidden]

    Raises:
        ConfigError: the heads cannot be split over the ranks.
    """

    def __init__(self, sizes: DeltaNetSizes, tp: TPGroup) -> None:
        super().__init__(sizes, ("conv_q", "conv_k", "conv_v"), False, tp)
        queries, keys, values = sizes.features
        self.in_proj_qkvz = ColumnParallelLinear(
            sizes.hidden_size,
            {"in_q": queries, "in_k": keys, "in_v": values, "in_proj_z": values},
            tp,
            {"in_q": self.num_replicas, "in_k": self.num_replicas},
        )
        self.in_proj_ba = ColumnParallelLinear(
            sizes.hidden_size,
            {"in_proj_b": sizes.num_value_heads, "in_proj_a": sizes.num_value_heads},
            tp,
        )
        self.norm = HeadGatedNorm(sizes.value_size, sizes.norm_eps, F.silu)
        self.out_proj = RowParallelLinear(values, sizes.hidden_size, tp)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        channels = self.conv1d.num_channels
        mixed, gate = self.in_proj_qkvz(hidden_states).split(
            (channels, self.num_heads * self.value_size), dim=-1
        )
        y = self.run_sequences(mixed, *self.in_proj_ba(hidden_states).chunk(2, dim=-1))
        return self.out_proj(self.norm(y, gate).flatten(1))


class KimiDeltaAttention(DeltaLayer):
    """Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692, section 3), heads split over ranks.

    It is a Gated DeltaNet in which each key element has its own decay, and whose gates are low-rank
    projections.

    Args:
        sizes: dimensions over all ranks.
        tp: the ranks that share the heads.

    Shape: positions [T], hidden_states [T, hidden] -> [T, hidden]

    Raises:
        ConfigError: the heads cannot be split over the ranks.
    """

    def __init__(self, sizes: DeltaNetSizes, tp: TPGroup) -> None:
        super().__init__(sizes, ("q_conv1d", "k_conv1d", "v_conv1d"), True, tp)
        hidden, rank = sizes.hidden_size, sizes.value_size
        queries, keys, values = sizes.features
        self.qkv_proj = ColumnParallelLinear(
            hidden, {"q_proj": queries, "k_proj": keys, "v_proj": values}, tp
        )
        self.f_a_proj, self.g_a_proj = (
            whole_linear(hidden, rank, tp),
            whole_linear(hidden, rank, tp),
        )
        self.f_b_proj = ColumnParallelLinear(rank, {"": keys}, tp)
        self.g_b_proj = ColumnParallelLinear(rank, {"": values}, tp)
        self.b_proj = ColumnParallelLinear(hidden, {"": sizes.num_value_heads}, tp)
        self.o_norm = HeadGatedNorm(sizes.value_size, sizes.norm_eps, torch.sigmoid)
        self.o_proj = RowParallelLinear(values, hidden, tp)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        y = self.run_sequences(
            self.qkv_proj(hidden_states),
            self.b_proj(hidden_states),
            self.f_b_proj(self.f_a_proj(hidden_states)),
        )
        gate = self.g_b_proj(self.g_a_proj(hidden_states))
        return self.o_proj(self.o_norm(y, gate).flatten(1))


def _unit(x: Tensor) -> Tensor:
    """Scale vectors [..., D] to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _LENGTH_EPS)
