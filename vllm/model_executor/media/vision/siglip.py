"""The vision tower of SigLIP (Zhai et al. 2023, arXiv 2303.15343)."""

from collections.abc import Collection

from torch import Tensor, nn

from vllm.model_executor.layers.norm import LayerNorm
from vllm.model_executor.media.vision.layers import PatchEmbedding, PositionTable
from vllm.model_executor.media.vision.transformer import TowerLayers
from vllm.multimodal.images.tower_config import TowerConfig


class SiglipEmbeddings(nn.Module):
    """Embeds patches and adds their positions.

    Shape: [B, 3, H, W] -> [B, N, C]
    """

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.patch_embedding = PatchEmbedding(size, config.patch_size)
        self.position_embedding = PositionTable(config.patches_per_side**2, size)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.position_embedding(self.patch_embedding(pixels))


class SiglipTower(nn.Module):
    """SigLIP up to the last hidden state that is used.

    Args:
        config: config of the tower.
        num_layers: layers to build; None: all, and the norm after the last one.
    """

    def __init__(self, config: TowerConfig, num_layers: int | None = None) -> None:
        super().__init__()
        self.embeddings = SiglipEmbeddings(config)
        self.num_layers = config.num_hidden_layers if num_layers is None else num_layers
        self.encoder = TowerLayers(config, self.num_layers)
        if num_layers is None:
            self.post_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, pixels: Tensor, wanted: Collection[int]) -> dict[int, Tensor]:
        """Return layer count -> hidden states [B, N, C] after this number of layers.

        Args:
            pixels: [B, 3, H, W], normalised.
            wanted: the layer counts.
        """
        return self.encoder(self.embeddings(pixels), wanted)

    def last(self, pixels: Tensor) -> Tensor:
        """Return the last hidden state [B, N, C] after the final norm.

        The tower must have all layers.
        """
        return self.post_layernorm(self(pixels, (self.num_layers,))[self.num_layers])
