"""LLaVA-NeXT (Liu et al. 2024) and Granite Vision: a small copy of the image, and tiles of it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm.errors import RequestError
from vllm.multimodal.families.llava import RepeatedToken, read_features
from vllm.multimodal.images.hf_processor import check_ratio
from vllm.multimodal.images.settings import MAX_PIXELS, check_fixed_size
from vllm.multimodal.images.tower_config import TowerConfig
from vllm.multimodal.interface.checks import is_whole, wrong_config, wrong_setting
from vllm.multimodal.interface.family import EncoderInput

_MAX_LAYOUTS = 2**10


class Layout(NamedTuple):
    """The tiles of an image, and which of their patches show it; the others are padding."""

    tile_rows: int
    tile_columns: int
    top: int
    """First row of patches that shows the image."""
    left: int
    """First column of patches that shows the image."""
    rows: int
    columns: int

    @property
    def num_tiles(self) -> int:
        """Number of tiles, plus one for the small copy of the whole image."""
        return 1 + self.tile_rows * self.tile_columns

    def num_tokens(self, side: int) -> int:
        """Return the number of tokens: of the copy, of the patches, and of the ends of rows.

        Args:
            side: patches of a row of a tile.
        """
        return side * side + self.rows * (self.columns + 1)


class LlavaNextFamily(RepeatedToken):
    """Images of LLaVA-NeXT. The layout of tiles is the one that wastes the least of the image."""

    image_processor = "LlavaNextImageProcessor"

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        check_fixed_size(settings, self.tower.image_size)
        check_grid(config, self.tower)
        self._sizes = self._read_sizes()

    def _read_sizes(self) -> list[tuple[int, int]]:
        key, tile = "image_grid_pinpoints", self.tower.image_size

        def is_size(size: Any) -> bool:
            is_pair = isinstance(size, list | tuple) and len(size) == 2
            return is_pair and all(is_whole(edge, MAX_PIXELS) and not edge % tile for edge in size)

        sizes = self.settings.get(key)
        if not (
            isinstance(sizes, list | tuple)
            and 0 < len(sizes) <= _MAX_LAYOUTS
            and all(map(is_size, sizes))
        ):
            raise wrong_setting(
                key,
                sizes,
                f"1 to {_MAX_LAYOUTS} pairs [height, width] of multiples of {tile}, the image_size "
                f"of vision_config in config.json",
            )
        return [(height, width) for height, width in sizes]

    def process(self, pixels: npt.NDArray[np.uint8]) -> EncoderInput:
        check_ratio(pixels)
        layout = self.layout_of(*pixels.shape[:2])
        tiles = self.processor(pixels)["pixel_values"][0]
        if len(tiles) != layout.num_tiles:
            height, width = pixels.shape[:2]
            raise RequestError(
                f"an image of {width} x {height} pixels cannot be used: the model needs "
                f"{layout.num_tiles} tiles, but the installed transformers makes {len(tiles)}. "
                f"Crop or pad the image, so that its sides differ less"
            )
        return self._input(tiles, layout)

    def _input(self, tiles: npt.NDArray[np.uint8], layout: Layout) -> EncoderInput:
        return self.encoder_input(tiles, layout, layout=np.array(layout, np.int32))

    def layout_of(self, height: int, width: int) -> Layout:
        """Return the tiles and the visible patches of an image.

        Args:
            height: height of the image in pixels.
            width: width of the image in pixels.

        Raises:
            RequestError: no part of it would be visible.
        """
        best_shown, best = 0, None
        for size in self._sizes:
            scale = min(size[1] / width, size[0] / height)
            shown = min(int(width * scale) * int(height * scale), width * height)
            # Of two sizes that show equally many pixels, the smaller one wastes less.
            if shown > best_shown or (
                best is not None and shown == best_shown and size[0] * size[1] < best[0] * best[1]
            ):
                best_shown, best = shown, size
        if best is None:
            raise RequestError(
                f"an image of {width} x {height} pixels cannot be used: its shorter side would be "
                f"smaller than a pixel"
            )
        return self._visible(best, height, width)

    def _visible(self, size: tuple[int, int], height: int, width: int) -> Layout:
        tile, side = self.tower.image_size, self.tower.patches_per_side
        tile_rows, tile_columns = size[0] // tile, size[1] // tile
        rows, columns = tile_rows * side, tile_columns * side
        top = left = 0
        # Rounded in the same order as in transformers, with which the model was trained.
        if width / height > columns / rows:
            top = (rows - int(round(height * (columns / width), 7))) // 2
        else:
            left = (columns - int(round(width * (rows / height), 7))) // 2
        return Layout(tile_rows, tile_columns, top, left, rows - 2 * top, columns - 2 * left)

    def num_tokens(self, grid: tuple[int, ...]) -> int:
        return Layout(*grid).num_tokens(self.tower.patches_per_side)

    def num_parts(self, grid: tuple[int, ...]) -> int:
        return Layout(*grid).num_tiles

    def largest(self) -> EncoderInput:
        side = self.tower.patches_per_side
        layouts = [self._visible(size, *size) for size in self._sizes]
        layout = max(layouts, key=lambda each: (each.num_tiles, each.num_tokens(side)))
        return self._input(self.black_tiles(layout.num_tiles), layout)


def check_grid(config: Mapping[str, Any], tower: TowerConfig) -> None:
    """Check that a tile has exactly one embedding for each patch.

    Raises:
        ConfigError: a tile has another number of embeddings; the message names the strategy.
    """
    features = read_features(config, tower)
    if features.embeddings_per_tile(tower) != tower.patches_per_side**2:
        needed = "full" if features.drops_first else "default"
        raise wrong_config(
            "vision_feature_select_strategy",
            config.get("vision_feature_select_strategy"),
            f"'{needed}' with a tower of {tower.model_type}",
        )


Family = LlavaNextFamily
