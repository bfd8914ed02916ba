"""The encoder of Idefics3 (Laurençon et al. 2024, arXiv 2408.12637) and SmolVLM."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from vllm.model_executor.media.vision.layers import TowerLinear, merge_patches
from vllm.model_executor.media.vision.siglip import SiglipTower
from vllm.model_executor.media.vision.tiles import TileEncoder
from vllm.multimodal.families.idefics3 import TOWERS, merged_patches
from vllm.multimodal.images.tower_config import read_tower_config


class Idefics3Projection(nn.Module):
    """One matmul, nested to match the parameter names of checkpoints."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.proj = TowerLinear(input_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class Idefics3Connector(nn.Module):
    """Joins squares of patches, and projects them with a matmul.

    Args:
        scale: height and width of a square, in patches.
        size: C, of a patch.
        hidden_size: hidden size of the language model's embeddings.

    Shape: [B, N, C] -> [B, N / scale^2, hidden_size]
    """

    def __init__(self, scale: int, size: int, hidden_size: int) -> None:
        super().__init__()
        self.scale = scale
        self.modality_projection = Idefics3Projection(scale * scale * size, hidden_size)

    def forward(self, patches: Tensor) -> Tensor:
        return self.modality_projection(merge_patches(patches, self.scale))


class Idefics3Encoder(TileEncoder):
    """A SigLIP tower, and a connector that joins its patches.

    Tiles have no padding, so the position of a patch is its index.
    """

    prefixes: ClassVar[tuple[str, ...]] = ("vision_model.", "connector.")

    def __init__(self, config: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__(config, hidden_size)
        tower = read_tower_config(config, TOWERS)
        scale = merged_patches(config, tower)
        self.embeddings_per_tile = (tower.patches_per_side // scale) ** 2
        self.vision_model = SiglipTower(tower)
        self.connector = Idefics3Connector(scale, tower.hidden_size, hidden_size)

    def encode(self, pixels: Tensor) -> Tensor:
        return self.connector(self.vision_model.last(pixels))


Encoder = Idefics3Encoder
