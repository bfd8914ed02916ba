"""Mixers of Mamba and Mamba-2, which replace attention.

Each is a convolution over the last tokens, and a state-space model whose parameters depend on the
token.

Independent of batches: `StateLayer` knows which tokens belong to which request.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from vllm.attention import StateLayer, StateRows, States
from vllm.attention.state import load_states, store_states
from vllm.config.parallel import sizes_that_fit
from vllm.distributed import TPGroup, divide
from vllm.errors import ConfigError
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.norm import PlainRMSNorm, RMSNorm
from vllm.model_executor.layers.slice import Slice, SlicedModule, packed_slices
from vllm.ops import get_ops
from vllm.ops.native.state_space import (
    ScannedTokens,
    TokenStates,
    convolve,
    scan_channels,
    scan_heads,
    scan_padded_channels,
    time_steps,
)

_ACTIVATIONS = ("silu", "swish")
"""Two names of one function."""


def check_activation(name: str) -> None:
    if name not in _ACTIVATIONS:
        raise ConfigError(
            f"hidden_act {name!r} in config.json is not supported for recurrent layers; "
            f"supported: {', '.join(_ACTIVATIONS)}"
        )


class Convolution(SlicedModule):
    """A depthwise causal convolution: each channel has its own kernel.

    Args:
        parts: name in the checkpoint -> channels over all ranks.
        kernel: K, the number of tokens that it sees.
        has_bias: whether there is a bias.
        tp: the ranks that share the channels.
        num_replicas: name -> ranks that have the same channels, when not 1.
        has_silu: whether silu is applied to the output.
    """

    weight: nn.Parameter
    """[D, 1, K]"""
    bias: nn.Parameter | None

    def __init__(
        self,
        parts: Mapping[str, int],
        kernel: int,
        has_bias: bool,
        tp: TPGroup,
        num_replicas: Mapping[str, int] | None = None,
        has_silu: bool = True,
    ) -> None:
        super().__init__()
        self.has_silu = has_silu
        slices = packed_slices(parts, tp, num_replicas)
        self.num_channels, self.kernel = sum(part.size for part in slices.values()), kernel
        self.weight = nn.Parameter(torch.empty(self.num_channels, 1, kernel), requires_grad=False)
        self.slices["weight"] = slices
        self.register_parameter("bias", None)
        if has_bias:
            self.bias = nn.Parameter(torch.empty(self.num_channels), requires_grad=False)
            self.slices["bias"] = slices

    def forward(self, x: Tensor, window: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Convolve x, continuing from the window of last inputs; return the output and the new
        window.

        See `vllm.ops.native.state_space.convolve`.
        """
        return convolve(x, window, self.weight[:, 0], self.bias, lengths, self.has_silu)


def advance_windows(conv: Convolution, x: Tensor, rows: StateRows, windows: Tensor) -> Tensor:
    """Run a convolution over a few tokens of each sequence, and update their windows in the cache.

    Args:
        conv: the convolution.
        x: inputs of the convolution [B, L, D].
        rows: the cache rows of the sequences.
        windows: [rows, K - 1, D], the last inputs of each sequence.
    """
    before = load_states((windows,), rows.indices, rows.is_new)
    out, after = conv(x, *before, rows.lengths)
    store_states((windows,), rows.indices, (after,))
    return out


class GatedRMSNorm(SlicedModule):
    """Compute norm(x * silu(gate)) * weight, with one RMS norm for each group of features.

    Args:
        size: features over all ranks.
        num_groups: groups of features over all ranks.
        eps: added to the mean of squares.
        tp: the ranks that share the features.
        is_gated_last: compute norm(x) * weight * silu(gate) instead.

    Shape: x, gate [T, size / ranks] -> [T, size / ranks]
    """

    weight: nn.Parameter

    def __init__(
        self, size: int, num_groups: int, eps: float, tp: TPGroup, is_gated_last: bool = False
    ) -> None:
        super().__init__()
        self.eps, self.tp, self.is_gated_last = eps, tp, is_gated_last
        self.group_size = divide(size, num_groups)
        self.total_groups = num_groups
        self.num_groups = max(1, num_groups // tp.size)
        local = divide(size, tp.size)
        self.weight = nn.Parameter(torch.ones(local), requires_grad=False)
        self.slices["weight"] = {"": Slice(0, 0, local, size)}

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        if self.is_gated_last:
            normed = self._normed(x.float()) * self.weight.float()
            return (normed * nn.functional.silu(gate.float())).to(gate.dtype)
        return self._normed(gated(x, gate)).to(gate.dtype) * self.weight

    def _normed(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (self.num_groups, -1))
        squares = groups.square().sum(-1, keepdim=True)
        if groups.shape[-1] < self.group_size:  # this rank has only a part of one group
            before = self.tp.rank * self.total_groups // self.tp.size
            of_all = nn.functional.pad(squares[..., 0], (before, self.total_groups - 1 - before))
            squares = self.tp.all_reduce(of_all)[..., before : before + 1, None]
        return (groups * torch.rsqrt(squares / self.group_size + self.eps)).flatten(-2)


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """Return x * silu(gate) in float32."""
    return x.float() * nn.functional.silu(gate.float())


@dataclass(frozen=True, kw_only=True)
class Mamba2Sizes:
    """The dimensions of a Mamba-2 mixer, over all ranks."""

    hidden_size: int
    num_heads: int
    head_size: int
    num_groups: int
    """Number of groups of heads that share B and C."""
    state_size: int
    """N: number of elements in the state of each of a head's features."""
    kernel: int
    """Tokens that the convolution sees."""
    has_bias: bool
    """Whether the input projection has a bias, and the output one if has_out_bias is None."""
    has_conv_bias: bool
    norm_eps: float
    time_step_limits: tuple[float, float]
    activation: str
    has_out_bias: bool | None = None
    has_norm: bool = True
    """Whether the gated output of the heads is normed."""
    is_gated_last: bool = False
    """The gate multiplies after the norm, and not before."""
    in_scales: Mapping[str, float] = field(default_factory=dict)
    """Part of what the projection in puts out -> what multiplies it, when not 1."""

    def __post_init__(self) -> None:
        check_activation(self.activation)
        if self.num_heads % self.num_groups:
            raise ConfigError(
                f"config.json: the number of Mamba heads ({self.num_heads}) must be a multiple of "
                f"the number of their groups ({self.num_groups}). Correct the file"
            )

    @property
    def inner_size(self) -> int:
        """Number of features of all heads together."""
        return self.num_heads * self.head_size

    @property
    def conv_parts(self) -> dict[str, int]:
        """Return name -> channels of each part of the convolution's input."""
        shared = self.num_groups * self.state_size
        return {"conv_x": self.inner_size, "conv_b": shared, "conv_c": shared}

    @property
    def in_parts(self) -> dict[str, int]:
        """Return name -> features of each part of the input projection, in the order of the
        checkpoint.
        """
        shared = self.num_groups * self.state_size
        inner = self.inner_size
        return {
            "in_gate": inner,
            "in_x": inner,
            "in_b": shared,
            "in_c": shared,
            "in_dt": self.num_heads,
        }


def _fits(sizes: Mamba2Sizes, num_ranks: int) -> bool:
    """Return whether heads and groups can be divided evenly over this number of ranks."""
    groups_fit = sizes.num_groups % num_ranks == 0 or num_ranks % sizes.num_groups == 0
    return groups_fit and sizes.num_heads % num_ranks == 0


class Mamba2Mixer(SlicedModule, StateLayer):
    """The mixer of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060, section 7), heads split over ranks.

    A group of heads is on one rank; if there is only one group, all ranks may share it.

    Args:
        sizes: dimensions over all ranks.
        tp: the ranks that share the heads.

    Shape: positions [T], hidden_states [T, hidden] -> [T, hidden]

    Raises:
        ConfigError: the groups cannot be split over the ranks.
    """

    cache_names: ClassVar[tuple[str, ...]] = ("window", "ssm_state")

    window: Tensor | None
    """[rows, K - 1, channels] the last inputs of the convolution."""
    ssm_state: Tensor | None
    """[rows, H, P, N] float32."""
    A_log: nn.Parameter
    D: nn.Parameter
    dt_bias: nn.Parameter
    in_scales: Tensor | None
    """[features of the projection in]"""

    def __init__(self, sizes: Mamba2Sizes, tp: TPGroup) -> None:
        super().__init__()
        num_groups = sizes.num_groups
        if not _fits(sizes, tp.size):
            fitting = sizes_that_fit(lambda size: _fits(sizes, size), sizes.num_heads)
            raise ConfigError(
                f"tensor_parallel_size ({tp.size}) must divide the {sizes.num_heads} heads of the "
                f"model's Mamba layers, and must divide, or be a multiple of, their {num_groups} "
                f"groups of heads. {fitting}"
            )
        replicas = max(1, tp.size // num_groups)
        self.in_proj = ColumnParallelLinear(
            sizes.hidden_size,
            sizes.in_parts,
            tp,
            {"in_b": replicas, "in_c": replicas},
            bias=sizes.has_bias,
        )
        self.conv1d = Convolution(
            sizes.conv_parts,
            sizes.kernel,
            sizes.has_conv_bias,
            tp,
            {"conv_b": replicas, "conv_c": replicas},
        )
        self.num_heads = divide(sizes.num_heads, tp.size)
        self.num_groups = max(1, num_groups // tp.size)
        self.head_size, self.state_size = sizes.head_size, sizes.state_size
        self.limits = sizes.time_step_limits
        for name in ("A_log", "D", "dt_bias"):
            values = torch.empty(self.num_heads, dtype=torch.float32)
            self.register_parameter(name, nn.Parameter(values, requires_grad=False))
            self.slices[name] = {"": Slice(0, 0, self.num_heads, sizes.num_heads)}
        scales = None
        if any(scale != 1.0 for scale in sizes.in_scales.values()):
            factors = [sizes.in_scales.get(name, 1.0) for name in sizes.in_parts]
            # On the CPU even while a model is built on the meta device, because no checkpoint has
            # these values.
            counts = torch.tensor(self.in_proj.split_sizes, device="cpu")
            of_parts = torch.tensor(factors, dtype=torch.float32, device="cpu")
            scales = of_parts.repeat_interleave(counts)
        self.register_buffer("in_scales", scales, persistent=False)
        self.norm: GatedRMSNorm | None = None
        if sizes.has_norm:
            self.norm = GatedRMSNorm(
                sizes.inner_size, num_groups, sizes.norm_eps, tp, sizes.is_gated_last
            )
        has_out_bias = sizes.has_bias if sizes.has_out_bias is None else sizes.has_out_bias
        self.out_proj = RowParallelLinear(
            sizes.inner_size, sizes.hidden_size, tp, bias=has_out_bias
        )

    def state_shapes(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        conv = self.conv1d
        window = (conv.kernel - 1, conv.num_channels)
        state = (self.num_heads, self.head_size, self.state_size)
        return (window, conv.weight.dtype), (state, torch.float32)

    def input_shapes(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        dtype = self.conv1d.weight.dtype
        return ((self.conv1d.num_channels,), dtype), ((self.num_heads,), dtype)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        inner, channels = self.num_heads * self.head_size, self.conv1d.num_channels
        projected = self.in_proj(hidden_states)
        if self.in_scales is not None:
            projected = (projected * self.in_scales).to(projected.dtype)
        gate, mixed, dt = projected.split((inner, channels, self.num_heads), dim=-1)
        y = self.run_sequences(mixed, dt)
        if self.norm is None:
            return self.out_proj(gated(y, gate).to(gate.dtype))
        return self.out_proj(self.norm(y, gate))

    def advance(
        self, inputs: tuple[Tensor, ...], lengths: Tensor | None, states: States
    ) -> tuple[Tensor, States]:
        (mixed, dt), (window, state) = inputs, states
        mixed, window = self.conv1d(mixed, window, lengths)
        x, b, c = self._split(mixed)
        steps = time_steps(dt, self.dt_bias, lengths, self.limits)
        y, state = scan_heads(x, steps, -self.A_log.exp(), b, c, state)
        return (y + x * self.D[:, None]).flatten(-2), (window, state)

    def advance_rows(self, inputs: tuple[Tensor, ...], rows: StateRows, caches: States) -> Tensor:
        """Run a few tokens of each sequence, and update the recurrent states in the cache
        in place.
        """
        (mixed, dt), (windows, states) = inputs, caches
        mixed = advance_windows(self.conv1d, mixed, rows, windows)
        x, b, c = self._split(mixed)
        steps = time_steps(dt, self.dt_bias, rows.lengths, self.limits)
        decay, scan = -self.A_log.exp(), get_ops().scan_tokens

        def run(indices: Tensor, is_new: Tensor, x: Tensor, steps: Tensor, *bc: Tensor) -> Tensor:
            at = TokenStates(states, indices, is_new)
            return scan(at, ScannedTokens(x, steps, decay, *bc))

        y = rows.by_token(run, x, steps, b, c)
        return (y + x * self.D[:, None]).flatten(-2)

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the output of the convolution into x [..., H, P], B and C [..., G, N]."""
        shared = self.num_groups * self.state_size
        x, b, c = mixed.split((self.num_heads * self.head_size, shared, shared), dim=-1)
        heads = (self.num_heads, self.head_size)
        groups = (self.num_groups, self.state_size)
        return x.unflatten(-1, heads), b.unflatten(-1, groups), c.unflatten(-1, groups)


@dataclass(frozen=True, kw_only=True)
class MambaSizes:
    """The dimensions of a Mamba mixer, over all ranks."""

    hidden_size: int
    inner_size: int
    """Number of channels."""
    state_size: int
    """N: number of elements in the state of a channel."""
    rank: int
    """Rank of the projection to time steps."""
    kernel: int
    """Tokens that the convolution sees."""
    has_bias: bool
    """Whether the projections in and out have a bias."""
    has_conv_bias: bool
    activation: str
    norm_eps: float | None = None
    """Value added to the mean of squares when B, C and the time steps (before their projection) are
    normed; None: these are not normed."""
    norms_have_weights: bool = True

    def __post_init__(self) -> None:
        check_activation(self.activation)

    @property
    def in_parts(self) -> dict[str, int]:
        """Return name -> features of each part of the input projection, in the order of the
        checkpoint.
        """
        return {"in_x": self.inner_size, "in_gate": self.inner_size}


class MambaMixer(SlicedModule, StateLayer):
    """The mixer of Mamba (Gu and Dao 2023, arXiv 2312.00752, section 3), channels split over ranks.

    Args:
        sizes: dimensions over all ranks.
        tp: the ranks that share the channels.

    Shape: positions [T], hidden_states [T, hidden] -> [T, hidden]
    """

    cache_names: ClassVar[tuple[str, ...]] = ("window", "ssm_state")

    window: Tensor | None
    """[rows, K - 1, channels] the last inputs of the convolution."""
    ssm_state: Tensor | None
    """[rows, channels, N] float32."""
    A_log: nn.Parameter
    D: nn.Parameter

    def __init__(self, sizes: MambaSizes, tp: TPGroup) -> None:
        super().__init__()
        inner, state_size = sizes.inner_size, sizes.state_size
        self.in_proj = ColumnParallelLinear(
            sizes.hidden_size, sizes.in_parts, tp, bias=sizes.has_bias
        )
        self.conv1d = Convolution({"": inner}, sizes.kernel, sizes.has_conv_bias, tp)
        self.num_channels = self.conv1d.num_channels
        self.split_sizes = (sizes.rank, state_size, state_size)
        self.x_proj = RowParallelLinear(inner, sum(self.split_sizes), tp)
        self.dt_proj = ColumnParallelLinear(sizes.rank, {"": inner}, tp, bias=True)
        self.has_norms = sizes.norm_eps is not None
        if sizes.norm_eps is not None:
            norm = RMSNorm if sizes.norms_have_weights else PlainRMSNorm
            self.dt_layernorm = norm(sizes.rank, sizes.norm_eps)
            self.b_layernorm = norm(state_size, sizes.norm_eps)
            self.c_layernorm = norm(state_size, sizes.norm_eps)
        for name, shape in (
            ("A_log", (self.num_channels, state_size)),
            ("D", (self.num_channels,)),
        ):
            values = torch.empty(shape, dtype=torch.float32)
            self.register_parameter(name, nn.Parameter(values, requires_grad=False))
            self.slices[name] = {"": Slice(0, 0, self.num_channels, inner)}
        self.out_proj = RowParallelLinear(inner, sizes.hidden_size, tp, bias=sizes.has_bias)

    def state_shapes(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        conv = self.conv1d
        window = (conv.kernel - 1, conv.num_channels)
        return (window, conv.weight.dtype), (
            (self.num_channels, self.split_sizes[1]),
            torch.float32,
        )

    def input_shapes(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        return (((self.num_channels,), self.conv1d.weight.dtype),)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        mixed, gate = self.in_proj(hidden_states).chunk(2, dim=-1)
        y = gated(self.run_sequences(mixed), gate)
        return self.out_proj(y.to(hidden_states.dtype))

    def advance(
        self, inputs: tuple[Tensor, ...], lengths: Tensor | None, states: States
    ) -> tuple[Tensor, States]:
        (mixed,), (window, state) = inputs, states
        x, window = self.conv1d(mixed, window, lengths)
        low_rank, b, c = self.x_proj(x.to(mixed.dtype)).split(self.split_sizes, dim=-1)
        if self.has_norms:
            low_rank = self.dt_layernorm(low_rank.contiguous())
            b, c = self.b_layernorm(b.contiguous()), self.c_layernorm(c.contiguous())
        dt = self.dt_proj.method.apply(self.dt_proj, low_rank.contiguous(), None)
        assert self.dt_proj.bias is not None
        steps = time_steps(dt, self.dt_proj.bias, lengths)
        is_static = lengths is not None or x.shape[1] == 1
        scan = scan_padded_channels if is_static else scan_channels
        y, state = scan(x, steps, -self.A_log.exp(), b.float(), c.float(), state)
        return y + x * self.D, (window, state)
