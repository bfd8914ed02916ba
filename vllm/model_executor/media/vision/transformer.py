"""The layers of a tower in the order they run, and the checkpoint names of towers."""

from collections.abc import Collection

from torch import Tensor, nn

from vllm.model_executor.media.layer_stack import LayerStack
from vllm.model_executor.media.vision.layers import TowerLayer
from vllm.multimodal.images.tower_config import TowerConfig


class TowerLayers(nn.Module):
    """The first layers of CLIP, SigLIP or a tower with the same layers.

    Args:
        config: config of the tower.
        num_layers: layers to build; layers after the last hidden state that is used are left out.
    """

    def __init__(self, config: TowerConfig, num_layers: int) -> None:
        super().__init__()
        self.layers = LayerStack(
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
        """Return layer count -> hidden states [B, N, C] after this number of layers; 0 is `x`
        itself.
        """
        return self.layers.run(x, wanted)


def tower_parameter(name: str, prefix: str, tower: nn.Module) -> str | None:
    """Return the encoder's parameter name of a checkpoint tensor; None if the encoder does not need
    it.

    Args:
        name: name in the checkpoint. transformers has left out the level `vision_model.` since 5.0.
        prefix: prefix of the tower in the encoder.
        tower: built up to the last hidden state that is used.
    """
    if not name.startswith(prefix):
        return name
    within = name.removeprefix(prefix).removeprefix("vision_model.")
    is_optional = within.startswith(("encoder.layer", "post_layernorm.", "layernorm.", "head."))
    is_unused = within.endswith((".position_ids", ".mask_token"))
    if is_unused or (is_optional and not _has_module(tower, within)):
        return None
    return prefix + within


def _has_module(tower: nn.Module, name: str) -> bool:
    """Return whether the tower has the layer or module that a checkpoint tensor belongs to."""
    levels = 3 if name.startswith("encoder.layer") else 1
    module = ".".join(name.split(".")[:levels])
    return any(found == module for found, _ in tower.named_modules())
