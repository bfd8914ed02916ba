"""The encoder of Mistral Small 3.1 and 3.2, and Ministral 3 (Mistral AI 2025)."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from vllm.model_executor.layers.norm import RMSNorm
from vllm.model_executor.media.families.llava import LlavaProjector
from vllm.model_executor.media.families.pixtral import PixtralEncoder
from vllm.model_executor.media.vision.grid_encoder import join_blocks
from vllm.model_executor.media.vision.layers import TowerLinear
from vllm.multimodal.images.tower_config import TowerConfig
from vllm.multimodal.interface.checks import (
    config_number,
    config_object,
    config_whole,
    wrong_config,
)


class _PatchMerger(nn.Module):
    """Joins the patches of each block.

    Shape: [N, C] -> [N / block, C]
    """

    def __init__(self, hidden_size: int, block: int) -> None:
        super().__init__()
        self.block = block
        self.merging_layer = TowerLinear(hidden_size * block, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.merging_layer(join_blocks(x, self.block))


class _Projector(LlavaProjector):
    """A norm, a merger of patches, and two matmuls.

    Shape: [N, C] -> [N / block, hidden_size]
    """

    def __init__(
        self, config: Mapping[str, Any], input_size: int, hidden_size: int, block: int
    ) -> None:
        super().__init__(config, input_size, hidden_size)
        text = config_object(config, "text_config")
        self.norm = RMSNorm(input_size, config_number(text, "rms_norm_eps", 1e-5, "text_config."))
        self.patch_merger = _PatchMerger(input_size, block)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.patch_merger(self.norm(x)))


class Mistral3Encoder(PixtralEncoder):
    """The tower of Pixtral, and a projector that joins patches."""

    def __init__(self, config: Mapping[str, Any], hidden_size: int) -> None:
        merge_size = config_whole(config, "spatial_merge_size", 2, 2**10)
        super().__init__(config, hidden_size, merge_size)

    def make_projector(self, tower: TowerConfig, hidden_size: int) -> nn.Module:
        if len(self.layers) > 1:
            given = self.config["vision_feature_layer"]
            raise wrong_config("vision_feature_layer", given, "an integer")
        has_bias = self.config.get("multimodal_projector_bias") or False
        config = {**self.config, "multimodal_projector_bias": has_bias}
        return _Projector(config, tower.hidden_size, hidden_size, self.sizes.block)


Encoder = Mistral3Encoder
