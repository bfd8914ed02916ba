"""The vision tower of Qwen3-VL (arXiv 2511.21631).

Its language model also reads some intermediate layers of the tower (DeepStack, arXiv 2406.04334).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vllm.model_executor.layers.activation import get_activation
from vllm.model_executor.layers.norm import LayerNorm
from vllm.model_executor.media.vision.grid_encoder import (
    GridAttention,
    GridEncoder,
    GridLayer,
    GridPatchEmbedding,
    GridSizes,
    read_activation,
    read_sizes,
)
from vllm.model_executor.media.vision.interpolated_table import InterpolatedTable, two_neighbours
from vllm.model_executor.media.vision.layers import TowerLinear
from vllm.model_executor.media.vision.packed_attention import attend_within
from vllm.multimodal.families.qwen3_vl import read_deep_layers
from vllm.multimodal.interface.checks import config_object, config_whole

_NORM_EPS = 1e-6


class _MLP(nn.Module):
    """Two matmuls with an activation between.

    Shape: [..., input_size] -> [..., output_size]
    """

    activation: Callable[[Tensor], Tensor]

    def __init__(
        self, input_size: int, inner: int, output_size: int, activation: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.activation = activation
        self.linear_fc1 = TowerLinear(input_size, inner)
        self.linear_fc2 = TowerLinear(inner, output_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(self.activation(self.linear_fc1(x)))


class _Merger(_MLP):
    """Joins the patches of a block to one embedding of the language model.

    Args:
        sizes: sizes of the tower.
        hidden_size: hidden size of the language model.
        norms_blocks: the norm is applied to joined blocks; False: to single patches.

    Shape: [N, C] -> [N / patches of a block, hidden_size]
    """

    def __init__(self, sizes: GridSizes, hidden_size: int, norms_blocks: bool) -> None:
        width = sizes.block * sizes.hidden_size
        super().__init__(width, width, hidden_size, get_activation("gelu"))
        self.width, self.norms_blocks = width, norms_blocks
        self.norm = LayerNorm(width if norms_blocks else sizes.hidden_size, _NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        if self.norms_blocks:
            x = self.norm(x.reshape(-1, self.width))
        else:
            x = self.norm(x).reshape(-1, self.width)
        return super().forward(x)


class _Tower(nn.Module):
    """The vision tower; its modules are named as in checkpoints."""

    def __init__(
        self, vision: Mapping[str, Any], sizes: GridSizes, hidden_size: int, num_deep: int
    ) -> None:
        super().__init__()
        width = sizes.hidden_size
        inner = config_whole(vision, "intermediate_size", 4304, 2**20, "vision_config.")
        positions = config_whole(vision, "num_position_embeddings", 2304, 2**24, "vision_config.")
        activation = get_activation(read_activation(vision, "gelu_pytorch_tanh"))
        self.patch_embed = GridPatchEmbedding(sizes, has_bias=True)
        self.pos_embed = InterpolatedTable(positions, width, two_neighbours)
        self.blocks = nn.ModuleList(
            GridLayer(
                (LayerNorm(width, _NORM_EPS), LayerNorm(width, _NORM_EPS)),
                GridAttention(sizes),
                _MLP(width, inner, width, activation),
            )
            for _ in range(sizes.depth)
        )
        self.merger = _Merger(sizes, hidden_size, norms_blocks=False)
        self.deepstack_merger_list = nn.ModuleList(
            _Merger(sizes, hidden_size, norms_blocks=True) for _ in range(num_deep)
        )


class Qwen3VLEncoder(GridEncoder):
    """The vision tower of Qwen3-VL, with its mergers.

    The values of each layer in `deep_layers` are added after one of the first layers of the
    language model.
    """

    has_deep_layers: ClassVar[bool] = True
    """Whether the language model also reads some layers of the tower."""

    def __init__(self, config: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__(config, hidden_size, read_sizes(config, patch_size=16))
        vision = config_object(config, "vision_config")
        self.deep_layers = read_deep_layers(config) if self.has_deep_layers else ()
        self.num_added = len(self.deep_layers)
        self.visual = _Tower(vision, self.sizes, hidden_size, self.num_added)

    def position_table(self) -> InterpolatedTable:
        return self.visual.pos_embed

    def run(self, **tensors: Tensor) -> Tensor:
        x = self.visual.patch_embed(self.scaled(tensors))
        x = x + self.visual.pos_embed(tensors["neighbours"], tensors["weights"])
        attend = partial(attend_within, groups=tensors.get("frames"))
        deep: list[Tensor] = []
        for index, layer in enumerate(self.visual.blocks):
            x = layer(x, tensors["rotations"], attend)
            if index in self.deep_layers:
                deep.append(self.visual.deepstack_merger_list[len(deep)](x))
        return torch.cat([self.visual.merger(x), *deep], dim=1)


Encoder = Qwen3VLEncoder
