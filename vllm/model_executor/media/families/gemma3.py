"""The encoder of Gemma 3 (arXiv 2503.19786)."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vllm.model_executor.layers.norm import RMSNorm
from vllm.model_executor.media.vision.siglip import SiglipTower
from vllm.model_executor.media.vision.tiles import TileEncoder
from vllm.multimodal.families.gemma3 import TOWERS, tokens_per_side
from vllm.multimodal.images.tower_config import TowerConfig, read_tower_config


class Gemma3Projector(nn.Module):
    """Pools patches by average, and applies an RMS norm and a matmul.

    Args:
        tower: sizes of the vision tower.
        side: embeddings along one side of the image after pooling.
        hidden_size: hidden size of the language model's embeddings.

    Shape: [B, N, C] -> [B, side * side, hidden_size]
    """

    mm_input_projection_weight: nn.Parameter
    """[C, hidden_size]: the transpose of the weight of a linear layer."""

    def __init__(self, tower: TowerConfig, side: int, hidden_size: int) -> None:
        super().__init__()
        self.side = side
        weight = torch.empty(tower.hidden_size, hidden_size)
        self.mm_input_projection_weight = nn.Parameter(weight, requires_grad=False)
        self.mm_soft_emb_norm = RMSNorm(tower.hidden_size, tower.layer_norm_eps, offset=1)
        self.pooled = tower.patches_per_side // side

    def forward(self, patches: Tensor) -> Tensor:
        squares = patches.unflatten(1, (self.side, self.pooled, self.side, self.pooled))
        pooled = squares.mean((2, 4)).flatten(1, 2)
        return self.mm_soft_emb_norm(pooled) @ self.mm_input_projection_weight


class Gemma3Encoder(TileEncoder):
    """A SigLIP tower, and a projector that pools its patches."""

    prefixes: ClassVar[tuple[str, ...]] = ("vision_tower.", "multi_modal_projector.")

    def __init__(self, config: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__(config, hidden_size)
        tower = read_tower_config(config, TOWERS)
        side = tokens_per_side(config, tower)
        self.embeddings_per_tile = side * side
        self.vision_tower = SiglipTower(tower)
        self.multi_modal_projector = Gemma3Projector(tower, side, hidden_size)

    def encode(self, pixels: Tensor) -> Tensor:
        return self.multi_modal_projector(self.vision_tower.last(pixels))


Encoder = Gemma3Encoder
