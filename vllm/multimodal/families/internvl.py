"""InternVL 3 (Zhu et al.
2025, arXiv 2504.10479) in transformers: tiles and a small copy of the image.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from vllm.errors import RequestError
from vllm.multimodal.images.settings import check_fixed_size
from vllm.multimodal.images.tiles import TiledFamily
from vllm.multimodal.images.tower_config import TowerConfig
from vllm.multimodal.interface.checks import is_number, is_whole, wrong_config, wrong_setting
from vllm.multimodal.interface.family import EncoderInput, Expansion, TokenLookup

TOWERS = ("internvl_vision",)
"""`model_type` of the tower of InternVL."""

_MAX_TILES = 2**10


def merged_patches(config: Mapping[str, Any], tower: TowerConfig) -> int:
    """Return the side of the squares of patches that are joined to one embedding.

    Raises:
        ConfigError: a tile cannot be divided into such squares.
    """
    ratio = config.get("downsample_ratio")
    ratio = 0.5 if ratio is None else ratio
    side = tower.patches_per_side
    scale = round(1 / ratio) if is_number(ratio) and 1 / side <= ratio <= 1 else 0
    if not scale or scale * ratio != 1 or side % scale:
        raise wrong_config(
            "downsample_ratio",
            ratio,
            f"1 divided by a divisor of {side}, the number of patches in a row of an image",
        )
    return scale


class InternVLFamily(TiledFamily):
    """Images of InternVL, which are always cut into tiles.

    `crop_to_patches` is ignored, as by the processor of transformers. With `max_patches` 1 an image
    is one tile.
    """

    image_processor = "GotOcr2ImageProcessor"
    placeholder = "<IMG_CONTEXT>"
    text_of_image = "<IMG_CONTEXT>\n"
    towers: ClassVar[tuple[str, ...]] = TOWERS

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        super().__init__(config, {**settings, "crop_to_patches": True})
        check_fixed_size(settings, self.tower.image_size)
        scale = merged_patches(config, self.tower)
        self._tokens_of_tile = (self.tower.patches_per_side // scale) ** 2
        fewest, most = settings.get("min_patches"), settings.get("max_patches")
        if not is_whole(most, _MAX_TILES):
            raise wrong_setting("max_patches", most, f"an integer from 1 to {_MAX_TILES}")
        if not is_whole(fewest, most):
            raise wrong_setting("min_patches", fewest, "an integer from 1 to max_patches")
        # A small copy of the whole image follows if there are several tiles.
        self._most = most + (most > 1)

    def process(self, pixels: npt.NDArray[np.uint8]) -> EncoderInput:
        return self._input(self.processor(pixels)["pixel_values"])

    def grid_of_embeddings(self, count: int, grid: tuple[int, ...] | None) -> tuple[int, ...]:
        size = self._tokens_of_tile
        if grid is not None:
            raise RequestError(
                "image_grid_thw is not used by this model, which counts tiles: leave it out"
            )
        if count % size or not 0 < count <= self._most * size:
            raise RequestError(
                f"an image of this model must have {size} embeddings for each of its tiles, at "
                f"most {self._most * size}, got {count}"
            )
        return (count // size,)

    def _input(self, tiles: npt.NDArray[np.uint8]) -> EncoderInput:
        return self.encoder_input(tiles, (len(tiles),))

    def expand(self, grid: tuple[int, ...], token_id: TokenLookup) -> Expansion:
        num_embeddings = grid[0] * self._tokens_of_tile
        return Expansion(
            [token_id("<img>"), *[token_id(self.placeholder)] * num_embeddings, token_id("</img>")],
            [False, *[True] * num_embeddings, False],
        )

    def num_parts(self, grid: tuple[int, ...]) -> int:
        return grid[0]

    def largest(self) -> EncoderInput:
        return self._input(self.black_tiles(self._most))


Family = InternVLFamily
