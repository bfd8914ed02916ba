"""The vision tower of CLIP (Radford et al. 2021, arXiv 2103.00020)."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from vllm.model_executor.layers.norm import LayerNorm
from vllm.model_executor.media.vision.layers import PatchEmbedding, PositionTable
from vllm.model_executor.media.vision.transformer import TowerLayers
from vllm.multimodal.images.tower_config import TowerConfig


class ClipEmbeddings(nn.Module):
    """The class embedding, which represents the whole image, followed by the patches.

    Shape: [B, 3, H, W] -> [B, 1 + N, C]
    """

    class_embedding: nn.Parameter
    """[C]"""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.class_embedding = nn.Parameter(torch.empty(size), requires_grad=False)
        self.patch_embedding = PatchEmbedding(size, config.patch_size, bias=False)
        self.position_embedding = PositionTable(1 + config.patches_per_side**2, size)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embedding(pixels)
        whole = self.class_embedding.expand(patches.shape[0], 1, -1)
        return self.position_embedding(torch.cat([whole, patches], 1))


class ClipTower(nn.Module):
    """CLIP up to the last hidden state that is used.

    Args:
        config: config of the tower.
        num_layers: layers to build.
    """

    def __init__(self, config: TowerConfig, num_layers: int) -> None:
        super().__init__()
        self.embeddings = ClipEmbeddings(config)
        # Published checkpoints have this misspelled name.
        self.pre_layrnorm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.encoder = TowerLayers(config, num_layers)

    def forward(self, pixels: Tensor, wanted: Collection[int]) -> dict[int, Tensor]:
        """Return layer count -> hidden states [B, 1 + N, C] after this number of layers.

        Args:
            pixels: [B, 3, H, W], normalised.
            wanted: the layer counts.
        """
        return self.encoder(self.pre_layrnorm(self.embeddings(pixels)), wanted)
