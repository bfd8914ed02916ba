"""A short convolution between two gates, instead of attention in LFM2: a token sees only the last
few tokens before it.

Independent of launches: `StateLayer` knows whose tokens they are.
"""

from typing import ClassVar

import torch
from torch import Tensor

from vllm.attention import StateLayer, States
from vllm.distributed import TPGroup
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.mamba import Convolution
from vllm.model_executor.layers.slice import SlicedModule


class ShortConvolution(SlicedModule, StateLayer):
    """out(c * convolution(b * x)), where b, c and x are projections of the token. Its channels are
    split over ranks. (Liquid AI 2025, "LFM2 Technical Report", arXiv 2511.23404, section 2.)

    Args:
        hidden_size: features of a token, and channels over all ranks.
        kernel: tokens that the convolution sees.
        has_bias: of the convolution and of the projections in and out.
        tp: the ranks that share the channels.

    Shape: positions [T], hidden_states [T, hidden] -> [T, hidden]
    """

    cache_names: ClassVar[tuple[str, ...]] = ("window",)

    window: Tensor | None
    """[rows, K - 1, channels] the last inputs of the convolution."""

    def __init__(self, hidden_size: int, kernel: int, has_bias: bool, tp: TPGroup) -> None:
        super().__init__()
        in_parts = dict.fromkeys(("in_b", "in_c", "in_x"), hidden_size)
        self.in_proj = ColumnParallelLinear(hidden_size, in_parts, tp, bias=has_bias)
        self.conv1d = Convolution({"": hidden_size}, kernel, has_bias, tp, has_silu=False)
        self.o_proj = RowParallelLinear(hidden_size, hidden_size, tp, bias=has_bias)

    def state_shapes(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        conv = self.conv1d
        return (((conv.kernel - 1, conv.num_channels), conv.weight.dtype),)

    def input_shapes(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        return (((self.conv1d.num_channels,), self.conv1d.weight.dtype),)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        b, c, x = self.in_proj(hidden_states).chunk(3, dim=-1)
        mixed = c * self.run_sequences(b * x)
        return self.o_proj(mixed.to(hidden_states.dtype))

    def advance(
        self, inputs: tuple[Tensor, ...], lengths: Tensor | None, states: States
    ) -> tuple[Tensor, States]:
        mixed, window = self.conv1d(*inputs, *states, lengths)
        return mixed, (window,)
