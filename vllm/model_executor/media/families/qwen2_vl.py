"""The vision tower of Qwen2-VL (arXiv 2409.12191); patches attend to all patches of their frame."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

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
from vllm.model_executor.media.vision.layers import TowerLinear, TowerMLP
from vllm.model_executor.media.vision.packed_attention import attend_within
from vllm.multimodal.interface.checks import config_number, config_object

NORM_EPS = 1e-6


class BlockMerger(nn.Module):
    """Joins the patches of a block to one embedding of the language model.

    Args:
        sizes: sizes of the tower.
        norm: applied to patches.
        hidden_size: hidden size of the language model.

    Shape: [N, C] -> [N / patches of a block, hidden_size]
    """

    def __init__(self, sizes: GridSizes, norm: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.width = sizes.block * sizes.hidden_size
        self.ln_q = norm
        layers = (
            TowerLinear(self.width, self.width),
            nn.GELU(),
            TowerLinear(self.width, hidden_size),
        )
        self.mlp = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.ln_q(x).reshape(-1, self.width))


class _Tower(nn.Module):
    """The vision tower; its modules are named as in checkpoints."""

    def __init__(self, vision: Mapping[str, Any], sizes: GridSizes, hidden_size: int) -> None:
        super().__init__()
        width = sizes.hidden_size
        inner = int(width * config_number(vision, "mlp_ratio", 4, "vision_config."))
        activation = read_activation(vision, "quick_gelu")
        self.patch_embed = GridPatchEmbedding(sizes)
        self.blocks = nn.ModuleList(
            GridLayer(
                (LayerNorm(width, NORM_EPS), LayerNorm(width, NORM_EPS)),
                GridAttention(sizes),
                TowerMLP(width, inner, activation),
            )
            for _ in range(sizes.depth)
        )
        self.merger = BlockMerger(sizes, LayerNorm(width, NORM_EPS), hidden_size)


class Qwen2VLEncoder(GridEncoder):
    """The vision tower of Qwen2-VL, with its merger."""

    def __init__(self, config: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__(config, hidden_size, read_sizes(config, "embed_dim"))
        self.visual = _Tower(config_object(config, "vision_config"), self.sizes, hidden_size)

    def run(self, **tensors: Tensor) -> Tensor:
        x = self.visual.patch_embed(self.scaled(tensors))
        attend = partial(attend_within, groups=tensors.get("frames"))
        for layer in self.visual.blocks:
            x = layer(x, tensors["rotations"], attend)
        return self.visual.merger(x)


Encoder = Qwen2VLEncoder
