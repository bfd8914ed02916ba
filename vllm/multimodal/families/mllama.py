"""Llama 3.2 Vision (Meta 2024): an image is one token, and 1 to 4 tiles.

Cross-attention layers read the tiles.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from vllm.multimodal.images.settings import check_fixed_size, setting_bool
from vllm.multimodal.images.tiles import TiledFamily
from vllm.multimodal.interface.checks import (
    config_object,
    config_whole,
    is_whole,
    wrong_config,
    wrong_setting,
)
from vllm.multimodal.interface.family import EncoderInput, Expansion, TokenLookup

TOWERS = ("mllama_vision_model",)
"""`model_type` of the tower of Llama 3.2 Vision."""

_MAX_TILES = 2**4
_WITHIN = "vision_config."


def read_layouts(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the layouts of tiles (rows, columns) that an image can have.

    Models have learned embeddings for each layout, which are found by its index.

    Raises:
        ConfigError: the layouts of the model and of the image processor differ.
    """
    vision = config_object(config, "vision_config")
    most = config_whole(vision, "max_num_tiles", 4, _MAX_TILES, _WITHIN)
    every = range(1, most + 1)
    layouts = [(rows, columns) for rows in every for columns in every if rows * columns <= most]
    key = "supported_aspect_ratios"
    given = vision.get(key)
    if given is not None and not (
        isinstance(given, list | tuple)
        and all(isinstance(each, list | tuple) for each in given)
        and [tuple(each) for each in given] == layouts
    ):
        raise wrong_config(
            _WITHIN + key,
            given,
            f"all pairs [rows, columns] of at most max_num_tiles ({most}) tiles, in this order: "
            f"{[list(each) for each in layouts]}",
        )
    return layouts


class MllamaFamily(TiledFamily):
    """Images of Llama 3.2 Vision.

    Cross-attention layers read a hidden state for each patch, and one more for each tile; tiles
    that an image does not fill have none.
    """

    image_processor = "MllamaImageProcessor"
    placeholder = "<|image|>"
    text_of_image = "<|image|>"
    towers: ClassVar[tuple[str, ...]] = TOWERS

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        self._layouts = read_layouts(config)
        check_fixed_size(settings, self.tower.image_size)
        if not setting_bool(settings, "do_pad"):
            raise wrong_setting("do_pad", settings.get("do_pad"), "true")
        most, given = self._layouts[-1][0], settings.get("max_image_tiles")
        if not is_whole(given, most, most):
            raise wrong_setting(
                "max_image_tiles", given, f"max_num_tiles of vision_config in config.json ({most})"
            )

    def process(self, pixels: npt.NDArray[np.uint8]) -> EncoderInput:
        found = self.processor(pixels)
        layout = self._layouts[int(found["aspect_ratio_ids"].item()) - 1]
        tiles = found["pixel_values"][0, 0, : layout[0] * layout[1]]
        return self._input(tiles.astype(np.uint8), layout)

    def _input(self, tiles: npt.NDArray[np.uint8], layout: tuple[int, int]) -> EncoderInput:
        # Embedding 0 means "no image".
        index = np.array([1 + self._layouts.index(layout)])
        return self.encoder_input(tiles, layout, layout=index)

    def expand(self, grid: tuple[int, ...], token_id: TokenLookup) -> Expansion:
        rows, columns = grid
        states_of_tile = self.tower.patches_per_side**2 + 1
        return Expansion([token_id(self.placeholder)], [False], rows * columns * states_of_tile)

    def largest(self) -> EncoderInput:
        layout = self._layouts[-1]
        return self._input(self.black_tiles(layout[0] * layout[1]), layout)


Family = MllamaFamily
