"""The encoder of LLaVA 1.5 (Liu et al. 2023, arXiv 2310.03744)."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vllm.model_executor.layers.activation import get_activation
from vllm.model_executor.media.vision.clip import ClipTower
from vllm.model_executor.media.vision.layers import TowerLinear
from vllm.model_executor.media.vision.siglip import SiglipTower
from vllm.model_executor.media.vision.tiles import TileEncoder
from vllm.multimodal.families.llava import CLIP_LARGE, CLIP_OR_SIGLIP, read_features
from vllm.multimodal.images.tower_config import read_tower_config
from vllm.multimodal.interface.checks import config_bool, wrong_config

_TOWERS: Mapping[str, type[ClipTower] | type[SiglipTower]] = {
    "clip_vision_model": ClipTower,
    "siglip_vision_model": SiglipTower,
}


class LlavaProjector(nn.Module):
    """Two matmuls with an activation between.

    Shape: [..., input_size] -> [..., hidden_size]
    """

    activation: Callable[[Tensor], Tensor]

    def __init__(self, config: Mapping[str, Any], input_size: int, hidden_size: int) -> None:
        super().__init__()
        activation = config.get("projector_hidden_act") or "gelu"
        if not isinstance(activation, str):
            raise wrong_config("projector_hidden_act", activation, "the name of a function")
        self.activation = get_activation(activation)
        has_bias = config_bool(config, "multimodal_projector_bias", True)
        self.linear_1 = TowerLinear(input_size, hidden_size, has_bias)
        self.linear_2 = TowerLinear(hidden_size, hidden_size, has_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(self.activation(self.linear_1(x)))


class LlavaEncoder(TileEncoder):
    """A CLIP or SigLIP tower, and a projector of some of its hidden states."""

    prefixes: ClassVar[tuple[str, ...]] = ("vision_tower.", "multi_modal_projector.")

    def __init__(self, config: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__(config, hidden_size)
        tower = self.tower = read_tower_config(config, CLIP_OR_SIGLIP, CLIP_LARGE)
        self.features = read_features(config, tower)
        self.embeddings_per_tile = self.features.embeddings_per_tile(tower)
        self.vision_tower = _TOWERS[tower.model_type](tower, max(self.features.layers))
        self.multi_modal_projector = LlavaProjector(
            config, tower.hidden_size * len(self.features.layers), hidden_size
        )

    def encode(self, pixels: Tensor) -> Tensor:
        hidden = self.vision_tower(pixels, self.features.layers)
        first = int(self.features.drops_first)
        joined = torch.cat([hidden[n][:, first:] for n in self.features.layers], -1)
        return self.multi_modal_projector(joined)


Encoder = LlavaEncoder
