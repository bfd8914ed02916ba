"""The layers of a tower in the order they run, and the checkpoint names of towers."""

from collections.abc import Collection

from torch import Tensor, nn

from vllm.model_executor.vision.layers import TowerLayer
from vllm.multimodal.tower_config import TowerConfig


class TowerLayers(nn.Module):
    """The first layers of CLIP, SigLIP or a tower with the same layers.

    Args:
        config: of the tower.
        num_layers: that are built: the layers after the last hidden state that is used are not.
    """

    def __init__(self, config: TowerConfig, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            TowerLayer(
                config.hidden_size,
                config.intermediate_size,
                config.num_attention_heads,
                config.hidden_act,
                config.layer_norm_eps,
            )
            for _ in range(num_layers)
        )

    def forward(self, x: Tensor, wanted: Collection[int]) -> dict[int, Tensor]:
        """Return the hidden states [B, N, C] after some numbers of layers; 0: `x`."""
        found = {0: x}
        for index, layer in enumerate(self.layers, 1):
            x = layer(x)
            if index in wanted:
                found[index] = x
        return found


def is_unused(name: str, num_layers: int) -> bool:
    """Return whether a tensor of a tower is one that the engine does not need.

    Args:
        name: within the tower.
        num_layers: that are built.
    """
    if name.startswith("encoder.layers."):
        return int(name.split(".")[2]) >= num_layers
    return name.startswith("head.") or name.endswith(".position_ids")
