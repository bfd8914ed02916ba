"""The vision tower of GLM-4.1V (arXiv 2507.01006)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vllm.model_executor.layers.activation import get_activation
from vllm.model_executor.layers.norm import LayerNorm, RMSNorm
from vllm.model_executor.media.vision.grid_encoder import (
    FlatConvolution,
    GatedTowerMLP,
    GridAttention,
    GridEncoder,
    GridLayer,
    GridPatchEmbedding,
    GridSizes,
    join_blocks,
    read_activation,
    read_sizes,
)
from vllm.model_executor.media.vision.interpolated_table import InterpolatedTable, four_neighbours
from vllm.model_executor.media.vision.layers import TowerLinear
from vllm.model_executor.media.vision.packed_attention import attend_within
from vllm.multimodal.interface.checks import config_bool, config_number, config_object, config_whole

_NORM_EPS = 1e-5


class _Merger(GatedTowerMLP):
    """Turns blocks of patches into embeddings of the language model.

    Shape: [N, hidden_size] -> [N, hidden_size]
    """

    def __init__(self, hidden_size: int, inner: int, activation: str) -> None:
        super().__init__(hidden_size, inner, get_activation(activation), has_bias=False)
        self.proj = TowerLinear(hidden_size, hidden_size, bias=False)
        self.post_projection_norm = LayerNorm(hidden_size, _NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.gelu(self.post_projection_norm(self.proj(x))))


class _Embeddings(nn.Module):
    """Holds the position table under the name that checkpoints use."""

    def __init__(self, num_positions: int, hidden_size: int) -> None:
        super().__init__()
        self.position_embedding = InterpolatedTable(num_positions, hidden_size, four_neighbours)


class _Tower(nn.Module):
    """The vision tower; its modules are named as in checkpoints."""

    def __init__(self, vision: Mapping[str, Any], sizes: GridSizes, hidden_size: int) -> None:
        super().__init__()
        width, within = sizes.hidden_size, "vision_config."
        inner = config_whole(vision, "intermediate_size", 13696, 2**20, within)
        image_size = config_whole(vision, "image_size", 336, 2**14, within)
        eps = config_number(vision, "rms_norm_eps", 1e-5, within)
        has_bias = config_bool(vision, "attention_bias", False, within)
        activation = read_activation(vision, "silu")
        self.patch_embed = GridPatchEmbedding(sizes, has_bias=True)
        self.post_conv_layernorm = RMSNorm(width, eps)
        self.embeddings = _Embeddings((image_size // sizes.patch_size) ** 2, width)
        self.blocks = nn.ModuleList(
            GridLayer(
                (RMSNorm(width, eps), RMSNorm(width, eps)),
                GridAttention(sizes, has_bias, has_output_bias=False),
                GatedTowerMLP(width, hidden_size, get_activation(activation), has_bias=False),
            )
            for _ in range(sizes.depth)
        )
        self.post_layernorm = RMSNorm(width, eps)
        block = (width, sizes.merge_size, sizes.merge_size)
        self.downsample = FlatConvolution(block, hidden_size, has_bias=True)
        self.merger = _Merger(hidden_size, inner, activation)


class Glm4vEncoder(GridEncoder):
    """The vision tower of GLM-4.1V, with its merger."""

    def __init__(self, config: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__(config, hidden_size, read_sizes(config))
        self.visual = _Tower(config_object(config, "vision_config"), self.sizes, hidden_size)

    def position_table(self) -> InterpolatedTable:
        return self.visual.embeddings.position_embedding

    def run(self, **tensors: Tensor) -> Tensor:
        tower = self.visual
        x = tower.post_conv_layernorm(tower.patch_embed(self.scaled(tensors)))
        x = x + tower.embeddings.position_embedding(tensors["neighbours"], tensors["weights"])
        attend = partial(attend_within, groups=tensors.get("frames"))
        for layer in tower.blocks:
            x = layer(x, tensors["rotations"], attend)
        blocks = join_blocks(tower.post_layernorm(x), self.sizes.block)
        return tower.merger(tower.downsample(blocks))


Encoder = Glm4vEncoder
