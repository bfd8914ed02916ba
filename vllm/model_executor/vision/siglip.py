"""The vision tower of SigLIP (Zhai et al. 2023, arXiv 2303.15343)."""

from collections.abc import Collection

from torch import Tensor, nn

from vllm.model_executor.vision.layers import PatchEmbedding, PositionTable
from vllm.model_executor.vision.transformer import TowerLayers
from vllm.multimodal.tower_config import TowerConfig


class SiglipEmbeddings(nn.Module):
    """Patches and their positions.

    Shape: [B, 3, H, W] -> [B, N, C]
    """

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.patch_embedding = PatchEmbedding(3, size, config.patch_size)
        self.position_embedding = PositionTable(config.patches_per_side**2, size)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.position_embedding(self.patch_embedding(pixels))


class SiglipTower(nn.Module):
    """SigLIP up to the last hidden state that is used, without the norm after its last layer.

    Args:
        config: of the tower.
        num_layers: that are built.
    """

    def __init__(self, config: TowerConfig, num_layers: int) -> None:
        super().__init__()
        self.embeddings = SiglipEmbeddings(config)
        self.encoder = TowerLayers(config, num_layers)

    def forward(self, pixels: Tensor, wanted: Collection[int]) -> dict[int, Tensor]:
        """Return the hidden states [B, N, C] after some numbers of layers.

        Args:
            pixels: [B, 3, H, W], normalised.
            wanted: numbers of layers.
        """
        hidden: dict[int, Tensor] = self.encoder(self.embeddings(pixels), wanted)
        return hidden
