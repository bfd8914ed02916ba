"""Gated DeltaNet, which takes the place of attention: a convolution over the last tokens, and a
state that maps keys to values and is corrected by each token.

Independent of launches: `StateLayer` knows whose tokens they are.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.attention import StateLayer, States
from vllm.attention.state import load_states, store_states
from vllm.config.parallel import sizes_that_fit
from vllm.distributed import TPGroup, divide
from vllm.errors import ConfigError
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.mamba import Convolution, check_activation
from vllm.model_executor.layers.slice import Slice, SlicedModule
from vllm.ops import get_ops
from vllm.ops.native.delta_rule import run_delta_rule
from vllm.ops.native.state_space import time_steps

_LENGTH_EPS = 1e-6
"""Added to the squared length of queries and keys."""


class HeadGatedNorm(nn.Module):
    """norm(x) * weight * silu(gate), with a mean of squares of each head.

    Args:
        head_size: D.
        eps: added to the mean of squares.

    Shape: x [T, H, D] float32, gate [T, H, D] -> [T, H, D] of the dtype of the gate
    """

    weight: nn.Parameter

    def __init__(self, head_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(head_size), requires_grad=False)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight.float() * F.silu(gate.float())).to(gate.dtype)


@dataclass(frozen=True, kw_only=True)
class DeltaNetSizes:
    """The dimensions of a Gated DeltaNet, over all ranks."""

    hidden_size: int
    num_key_heads: int
    """Heads of queries and keys; each serves as many heads of values, one after the other."""
    num_value_heads: int
    key_size: int
    """K: of a head of queries or keys."""
    value_size: int
    """V: of a head of values."""
    kernel: int
    """Tokens that the convolution sees."""
    norm_eps: float
    activation: str

    def __post_init__(self) -> None:
        check_activation(self.activation)
        if self.num_value_heads % self.num_key_heads:
            raise ConfigError(
                f"config.json: linear_num_value_heads ({self.num_value_heads}) is not a multiple "
                f"of linear_num_key_heads ({self.num_key_heads})"
            )

    @property
    def heads_per_key(self) -> int:
        """Heads of values that a head of keys serves."""
        return self.num_value_heads // self.num_key_heads

    def mixed_parts(self, prefix: str) -> dict[str, int]:
        """Queries, keys and values, by names with a prefix -> features, in the order of the
        checkpoint."""
        keys = self.num_key_heads * self.key_size
        values = self.num_value_heads * self.value_size
        return {f"{prefix}q": keys, f"{prefix}k": keys, f"{prefix}v": values}


def _fits(sizes: DeltaNetSizes, num_ranks: int) -> bool:
    """Return whether heads can be divided over so many ranks."""
    keys = sizes.num_key_heads
    keys_fit = keys % num_ranks == 0 or num_ranks % keys == 0
    return keys_fit and sizes.num_value_heads % num_ranks == 0


class GatedDeltaNet(SlicedModule, StateLayer):
    """Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464), with its heads split over ranks. A key
    head is on one rank, or on several that share its value heads.

    Args:
        sizes: over all ranks.
        tp: the ranks that share the heads.

    Shape: positions [T], hidden_states [T, hidden] -> [T, hidden]

    Raises:
        ConfigError: the heads cannot be split over the ranks.
    """

    cache_names: ClassVar[tuple[str, ...]] = ("window", "delta_state")

    window: Tensor | None
    """[rows, kernel - 1, channels] the last inputs of the convolution."""
    delta_state: Tensor | None
    """[rows, H, V, K] float32."""
    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(self, sizes: DeltaNetSizes, tp: TPGroup) -> None:
        super().__init__()
        if not _fits(sizes, tp.size):
            fitting = sizes_that_fit(lambda size: _fits(sizes, size), sizes.num_value_heads)
            raise ConfigError(
                f"tensor_parallel_size ({tp.size}) must divide the {sizes.num_value_heads} value "
                f"heads of the model's linear attention, and must divide, or be a multiple of, its "
                f"{sizes.num_key_heads} key heads. {fitting}"
            )
        replicas = max(1, tp.size // sizes.num_key_heads)
        values = sizes.num_value_heads * sizes.value_size
        self.in_proj_qkvz = ColumnParallelLinear(
            sizes.hidden_size,
            sizes.mixed_parts("in_") | {"in_proj_z": values},
            tp,
            {"in_q": replicas, "in_k": replicas},
        )
        self.in_proj_ba = ColumnParallelLinear(
            sizes.hidden_size,
            {"in_proj_b": sizes.num_value_heads, "in_proj_a": sizes.num_value_heads},
            tp,
        )
        self.conv1d = Convolution(
            sizes.mixed_parts("conv_"),
            sizes.kernel,
            False,
            tp,
            {"conv_q": replicas, "conv_k": replicas},
        )
        self.num_key_heads = divide(sizes.num_key_heads * replicas, tp.size)
        self.num_heads = divide(sizes.num_value_heads, tp.size)
        self.key_size, self.value_size = sizes.key_size, sizes.value_size
        for name in ("A_log", "dt_bias"):
            numbers = torch.empty(self.num_heads, dtype=torch.float32)
            self.register_parameter(name, nn.Parameter(numbers, requires_grad=False))
            self.slices[name] = {"": Slice(0, 0, self.num_heads, sizes.num_value_heads)}
        self.norm = HeadGatedNorm(sizes.value_size, sizes.norm_eps)
        self.out_proj = RowParallelLinear(values, sizes.hidden_size, tp)

    def state_shapes(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        conv = self.conv1d
        window = (conv.kernel - 1, conv.num_channels)
        state = (self.num_heads, self.value_size, self.key_size)
        return (window, conv.weight.dtype), (state, torch.float32)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        channels = self.conv1d.num_channels
        mixed, gate = self.in_proj_qkvz(hidden_states).split(
            (channels, self.num_heads * self.value_size), dim=-1
        )
        b, a = self.in_proj_ba(hidden_states).chunk(2, dim=-1)
        y = self.run_sequences(mixed, b, a)
        normed = self.norm(y, gate.unflatten(-1, (self.num_heads, self.value_size)))
        return self.out_proj(normed.flatten(1))

    def advance(
        self, inputs: tuple[Tensor, ...], lengths: Tensor | None, states: States
    ) -> tuple[Tensor, States]:
        (mixed, b, a), (window, state) = inputs, states
        mixed, window = self.conv1d(mixed, window, lengths)
        logs, beta = self._gates(a, b, lengths)
        y, state = run_delta_rule(*self._split(mixed), logs, beta, state)
        return y, (window, state)

    def advance_rows(self, inputs: tuple[Tensor, ...], rows: Tensor, is_new: Tensor) -> Tensor:
        """See `StateLayer`. The operator replaces the states where they are."""
        assert self.window is not None and self.delta_state is not None
        mixed, b, a = (part[:, None] for part in inputs)
        windows = load_states((self.window,), rows, is_new)
        mixed, window = self.conv1d(mixed, *windows, None)
        store_states((self.window,), rows, (window,))
        logs, beta = self._gates(a, b, None)
        mixed = self._split(mixed[:, 0])
        return get_ops().delta_tokens(
            self.delta_state, rows, is_new, *mixed, logs[:, 0], beta[:, 0]
        )

    def _gates(self, a: Tensor, b: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """What is left of a state, as a logarithm, and how far a token corrects it, [B, L, H]."""
        logs = time_steps(a, self.dt_bias, lengths) * -self.A_log.exp()
        beta = b.float().sigmoid()
        if lengths is None:
            return logs, beta
        places = torch.arange(b.shape[1], dtype=lengths.dtype, device=b.device)
        return logs, beta * (places < lengths[:, None])[:, :, None]

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [..., G, K] of length 1, queries also divided by the root of K, and
        values [..., H, V], of what the convolution has put out."""
        keys = self.num_key_heads * self.key_size
        q, k, v = mixed.split((keys, keys, self.num_heads * self.value_size), dim=-1)
        q, k = (_unit(x.unflatten(-1, (self.num_key_heads, self.key_size))) for x in (q, k))
        return q * self.key_size**-0.5, k, v.unflatten(-1, (self.num_heads, self.value_size))


def _unit(x: Tensor) -> Tensor:
    """Vectors [..., D] of length 1 in the same directions."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _LENGTH_EPS)
