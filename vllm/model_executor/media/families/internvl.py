"""The encoder of InternVL 3 (Zhu et al. 2025, arXiv 2504.10479), in the format of transformers."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from vllm.model_executor.layers.norm import LayerNorm
from vllm.model_executor.media.families.llava import LlavaProjector
from vllm.model_executor.media.vision.intern_vit import InternVitTower
from vllm.model_executor.media.vision.layers import merge_patches
from vllm.model_executor.media.vision.tiles import TileEncoder
from vllm.multimodal.families.internvl import TOWERS, merged_patches
from vllm.multimodal.images.tower_config import TowerConfig, read_tower_config
from vllm.multimodal.interface.checks import is_whole, wrong_config


class InternVLProjector(LlavaProjector):
    """A norm, then two matmuls with an activation between.

    Shape: [..., input_size] -> [..., hidden_size]
    """

    def __init__(self, config: Mapping[str, Any], input_size: int, hidden_size: int) -> None:
        super().__init__(config, input_size, hidden_size)
        self.layer_norm = LayerNorm(input_size)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.layer_norm(x))


class InternVLEncoder(TileEncoder):
    """An InternViT tower whose patches are joined to squares, and a projector."""

    prefixes: ClassVar[tuple[str, ...]] = ("vision_tower.", "multi_modal_projector.")

    def __init__(self, config: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__(config, hidden_size)
        tower = read_tower_config(config, TOWERS)
        self.scale = merged_patches(config, tower)
        self.embeddings_per_tile = (tower.patches_per_side // self.scale) ** 2
        self.vision_tower = InternVitTower(config, tower, _layers_before(config, tower))
        self.multi_modal_projector = InternVLProjector(
            config, self.scale**2 * tower.hidden_size, hidden_size
        )

    def encode(self, pixels: Tensor) -> Tensor:
        patches = self.vision_tower(pixels)[:, 1:]
        return self.multi_modal_projector(merge_patches(patches, self.scale))


def _layers_before(config: Mapping[str, Any], tower: TowerConfig) -> int | None:
    """Return the number of layers before the hidden state that is used; None: all, and the norm.

    Raises:
        ConfigError: there is no such layer, or the model also uses the class embedding.
    """
    strategy = config.get("vision_feature_select_strategy") or "default"
    if strategy != "default":
        raise wrong_config("vision_feature_select_strategy", strategy, "'default'")
    layer, num_layers = config.get("vision_feature_layer"), tower.num_hidden_layers
    if layer is None or layer == -1:
        return None
    if not is_whole(layer, num_layers, -num_layers - 1):
        raise wrong_config(
            "vision_feature_layer", layer, f"an integer from {-num_layers - 1} to {num_layers}"
        )
    return layer if layer >= 0 else num_layers + 1 + layer


Encoder = InternVLEncoder
