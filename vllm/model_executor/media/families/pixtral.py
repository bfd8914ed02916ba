"""The encoder of LLaVA with the tower of Pixtral (arXiv 2410.07073)."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vllm.model_executor.layers.activation import get_activation
from vllm.model_executor.layers.norm import RMSNorm
from vllm.model_executor.media.families.llava import LlavaProjector
from vllm.model_executor.media.vision.grid_encoder import (
    Attend,
    FlatConvolution,
    GatedTowerMLP,
    GridEncoder,
    GridSizes,
)
from vllm.model_executor.media.vision.layers import TowerLinear
from vllm.model_executor.media.vision.packed_attention import attend_within
from vllm.model_executor.media.vision.rotations import rotate
from vllm.multimodal.families.pixtral import PIXTRAL, pixtral_features
from vllm.multimodal.images.tower_config import TowerConfig, read_tower_config
from vllm.multimodal.interface.checks import config_number, config_object, wrong_config

_NORM_EPS = 1e-5


class _Attention(nn.Module):
    """Attention with rotary embeddings; its parameters are named as in Llama.

    Shape: [N, C] -> [N, C]
    """

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = TowerLinear(hidden_size, hidden_size, bias=False)
        self.k_proj = TowerLinear(hidden_size, hidden_size, bias=False)
        self.v_proj = TowerLinear(hidden_size, hidden_size, bias=False)
        self.o_proj = TowerLinear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, rotations: Tensor, attend: Attend) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.num_heads, -1))
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        read = attend(rotate(query, rotations), rotate(key, rotations), value)
        return self.o_proj(read.flatten(1))


class _Layer(nn.Module):
    """One layer of the vision tower.

    Shape: [N, C] -> [N, C]
    """

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        size, activation = config.hidden_size, get_activation(config.hidden_act)
        self.attention_norm = RMSNorm(size, _NORM_EPS)
        self.attention = _Attention(size, config.num_attention_heads)
        self.ffn_norm = RMSNorm(size, _NORM_EPS)
        self.feed_forward = GatedTowerMLP(
            size, config.intermediate_size, activation, has_bias=False
        )

    def forward(self, x: Tensor, rotations: Tensor, attend: Attend) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotations, attend)
        return x + self.feed_forward(self.ffn_norm(x))


class _Layers(nn.Module):
    """Holds the layers under the name that checkpoints use."""

    def __init__(self, config: TowerConfig, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(config) for _ in range(num_layers))


class PixtralTower(nn.Module):
    """The first layers of the vision tower of Pixtral.

    Args:
        config: config of the tower.
        num_layers: layers to build.
    """

    def __init__(self, config: TowerConfig, num_layers: int) -> None:
        super().__init__()
        patch = (3, config.patch_size, config.patch_size)
        self.patch_conv = FlatConvolution(patch, config.hidden_size, has_bias=False)
        self.ln_pre = RMSNorm(config.hidden_size, _NORM_EPS)
        self.transformer = _Layers(config, num_layers)

    def forward(
        self, patches: Tensor, rotations: Tensor, attend: Attend, wanted: Collection[int]
    ) -> dict[int, Tensor]:
        """Return layer count -> hidden states [N, C] after this number of layers, for the wanted
        counts.
        """
        x = self.ln_pre(self.patch_conv(patches))
        found = {0: x}
        for index, layer in enumerate(self.transformer.layers, 1):
            x = layer(x, rotations, attend)
            if index in wanted:
                found[index] = x
        return found


class PixtralEncoder(GridEncoder):
    """A Pixtral tower, and a projector of some of its hidden states."""

    prefixes: ClassVar[tuple[str, ...]] = ("vision_tower.", "multi_modal_projector.")

    def __init__(self, config: Mapping[str, Any], hidden_size: int, merge_size: int = 1) -> None:
        tower = read_tower_config(config, PIXTRAL)
        super().__init__(config, hidden_size, _sizes(config, tower, merge_size))
        self.layers = pixtral_features(config, tower).layers
        self.vision_tower = PixtralTower(tower, max(self.layers))
        self.multi_modal_projector = self.make_projector(tower, hidden_size)

    def make_projector(self, tower: TowerConfig, hidden_size: int) -> nn.Module:
        """Make the projector from the concatenated hidden states [N, C * count] to embeddings."""
        return LlavaProjector(self.config, tower.hidden_size * len(self.layers), hidden_size)

    def parameter_name(self, name: str) -> str | None:
        within = name.removeprefix("vision_tower.transformer.layers.")
        if within != name and int(within.split(".")[0]) >= max(self.layers):
            return None
        return name

    def frequencies(self) -> tuple[Tensor, Tensor]:
        size = self.sizes.head_size
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        frequencies = 1.0 / self.sizes.theta**exponents
        return frequencies[::2], frequencies[1::2]

    def run(self, **tensors: Tensor) -> Tensor:
        attend = partial(attend_within, groups=tensors.get("frames"))
        hidden = self.vision_tower(self.scaled(tensors), tensors["rotations"], attend, self.layers)
        return self.multi_modal_projector(torch.cat([hidden[n] for n in self.layers], dim=1))


def _sizes(config: Mapping[str, Any], tower: TowerConfig, merge_size: int) -> GridSizes:
    vision = config_object(config, "vision_config")
    rope = {**vision, **config_object(vision, "rope_parameters")}
    heads = tower.num_attention_heads
    if tower.hidden_size % (4 * heads):
        accepted = f"a multiple of 4 * num_attention_heads ({4 * heads})"
        raise wrong_config("vision_config.hidden_size", tower.hidden_size, accepted)
    return GridSizes(
        hidden_size=tower.hidden_size,
        depth=tower.num_hidden_layers,
        num_heads=heads,
        patch_size=tower.patch_size,
        frames=1,
        merge_size=merge_size,
        theta=config_number(rope, "rope_theta", 10000.0, "vision_config."),
    )


Encoder = PixtralEncoder
