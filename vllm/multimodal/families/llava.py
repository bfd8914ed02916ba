"""LLaVA 1.5 (Liu et al. 2023, arXiv 2310.03744): every image is one square of a fixed size."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.multimodal.images.settings import check_fixed_size
from vllm.multimodal.images.tiles import SingleTileFamily, TiledFamily
from vllm.multimodal.images.tower_config import TowerConfig
from vllm.multimodal.interface.checks import is_whole, wrong_config
from vllm.multimodal.interface.family import Expansion, TokenLookup

CLIP_OR_SIGLIP = ("clip_vision_model", "siglip_vision_model")
"""`model_type` of the towers of the LLaVA models."""

CLIP_LARGE = TowerConfig(
    model_type="clip_vision_model",
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=24,
    num_attention_heads=16,
    image_size=336,
    patch_size=14,
    hidden_act="quick_gelu",
    layer_norm_eps=1e-5,
)
"""The tower of a LLaVA without `vision_config`."""


@dataclass(frozen=True, slots=True)
class TowerFeatures:
    """The hidden states of the vision tower that the projector of a LLaVA model uses."""

    layers: tuple[int, ...]
    """Numbers of layers after which hidden states are taken; several are joined."""
    drops_first: bool
    """The first embedding is left out: of CLIP, the one that represents the whole image."""

    def embeddings_per_tile(self, tower: TowerConfig) -> int:
        """Return how many embeddings an image, or a tile of it, has."""
        num_patches = tower.patches_per_side**2
        return num_patches + (tower.model_type == "clip_vision_model") - self.drops_first


def read_features(config: Mapping[str, Any], tower: TowerConfig) -> TowerFeatures:
    """Read from config.json which hidden states of the tower are used.

    Raises:
        ConfigError: there is no such layer or strategy.
    """
    layers = config.get("vision_feature_layer")
    layers = -2 if layers is None else layers
    several = layers if isinstance(layers, list) else [layers]
    num_layers = tower.num_hidden_layers
    if not several or not all(is_whole(n, num_layers, -num_layers - 1) for n in several):
        raise wrong_config(
            "vision_feature_layer",
            layers,
            f"an integer from {-num_layers - 1} to {num_layers} or a list of such integers, "
            f"because the tower has {num_layers} layers",
        )
    strategy = config.get("vision_feature_select_strategy") or "default"
    if strategy not in ("default", "full"):
        raise wrong_config("vision_feature_select_strategy", strategy, "'default' or 'full'")
    passed = tuple(n if n >= 0 else num_layers + 1 + n for n in several)
    return TowerFeatures(passed, strategy == "default")


class RepeatedToken(TiledFamily):
    """Images of any LLaVA version, whose tokens are one repeated placeholder token."""

    image_processor = "LlavaImageProcessor"
    placeholder = "<image>"
    text_of_image = "<image>\n"
    towers: ClassVar[tuple[str, ...]] = CLIP_OR_SIGLIP
    default_tower: ClassVar[TowerConfig | None] = CLIP_LARGE

    @abstractmethod
    def num_tokens(self, grid: tuple[int, ...]) -> int:
        """Return how many tokens an image has."""

    def expand(self, grid: tuple[int, ...], token_id: TokenLookup) -> Expansion:
        num_tokens = self.num_tokens(grid)
        return Expansion([token_id(self.placeholder)] * num_tokens, [True] * num_tokens)


class LlavaFamily(RepeatedToken, SingleTileFamily):
    """Images of LLaVA 1.5."""

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        self.features = read_features(config, self.tower)
        self.grid = (self.features.embeddings_per_tile(self.tower),)
        check_fixed_size(settings, self.tower.image_size)

    def num_tokens(self, grid: tuple[int, ...]) -> int:
        return grid[0]


Family = LlavaFamily
