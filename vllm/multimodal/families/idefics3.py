"""Idefics3 (Laurençon et al.
2024, arXiv 2408.12637) and SmolVLM: tiles and a small copy of the image.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from vllm.errors import ConfigError
from vllm.multimodal.images.settings import setting_bool, setting_edges
from vllm.multimodal.images.tiles import TiledFamily
from vllm.multimodal.images.tower_config import TowerConfig
from vllm.multimodal.interface.checks import config_whole, wrong_config, wrong_setting
from vllm.multimodal.interface.family import EncoderInput, Expansion, TokenLookup

TOWERS = ("idefics3_vision", "smolvlm_vision")
"""`model_type` of the towers of Idefics3 and SmolVLM."""

_MAX_LONGEST_EDGE = 4096
"""The image processor scales no image up beyond that."""


def merged_patches(config: Mapping[str, Any], tower: TowerConfig) -> int:
    """Return the side of the squares of patches that are joined to one embedding.

    Raises:
        ConfigError: a tile cannot be divided into such squares.
    """
    side = tower.patches_per_side
    scale = config_whole(config, "scale_factor", 2, side)
    if side % scale:
        raise wrong_config(
            "scale_factor",
            scale,
            f"a divisor of {side}, the number of patches in a row of an image",
        )
    return scale


class Idefics3Family(TiledFamily):
    """Images of Idefics3. An image of the size of a tile is one tile; others have more."""

    image_processor = "Idefics3ImageProcessor"
    placeholder = "<image>"
    text_of_image = "<image>"
    towers: ClassVar[tuple[str, ...]] = TOWERS

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        self._tokens_of_tile = (
            self.tower.patches_per_side // merged_patches(config, self.tower)
        ) ** 2
        tile = {"longest_edge": self.tower.image_size}
        if setting_edges(settings, "max_image_size") != tile:
            raise wrong_setting(
                "max_image_size",
                settings.get("max_image_size"),
                f"{tile}, the image_size of vision_config in config.json",
            )
        self._splits = setting_bool(settings, "do_image_splitting")
        self._longest_edge = setting_edges(settings, "size").get("longest_edge")
        if self._splits and not (self._longest_edge and setting_bool(settings, "do_resize")):
            key = "size" if setting_bool(settings, "do_resize") else "do_resize"
            raise wrong_setting(
                key,
                settings.get(key),
                "a setting that limits the number of tiles: do_resize true, and size with "
                "longest_edge",
            )

    def process(self, pixels: npt.NDArray[np.uint8]) -> EncoderInput:
        found = self.processor(pixels, return_row_col_info=True)
        grid = (int(found["rows"].item()), int(found["cols"].item()))
        return self._input(found["pixel_values"][0], grid)

    def _input(self, tiles: npt.NDArray[np.uint8], grid: tuple[int, int]) -> EncoderInput:
        assert len(tiles) == 1 + grid[0] * grid[1], (len(tiles), grid)
        return self.encoder_input(tiles, grid)

    def expand(self, grid: tuple[int, ...], token_id: TokenLookup) -> Expansion:
        rows, columns = grid
        edge = token_id("<fake_token_around_image>")
        soft = [token_id(self.placeholder)] * self._tokens_of_tile
        tokens: list[int] = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                tokens += [edge, token_id(f"<row_{row}_col_{column}>"), *soft]
            # One line break follows each row of tiles, and one more comes before the small copy.
            tokens += newline_tokens(token_id, 1 if row < rows else 2)
        tokens += [edge, token_id("<global-img>"), *soft, edge]
        return Expansion(tokens, [token == soft[0] for token in tokens])

    def num_parts(self, grid: tuple[int, ...]) -> int:
        return 1 + grid[0] * grid[1]

    def largest(self) -> EncoderInput:
        side = 0
        if self._splits and self._longest_edge:
            # The image processor rounds up to an even number.
            longest = min(self._longest_edge + self._longest_edge % 2, _MAX_LONGEST_EDGE)
            side = -(-longest // self.tower.image_size)
        side = 0 if side == 1 else side
        return self._input(self.black_tiles(1 + side * side), (side, side))


def newline_tokens(token_id: TokenLookup, number: int) -> list[int]:
    """Return the tokens of line breaks between special tokens.

    Args:
        token_id: looks up tokens.
        number: number of line breaks; a vocabulary has one token for all of them, or one for each.
    """
    for text in ("\n", "Ċ"):  # "Ċ" is a line break in byte-level vocabularies
        for several in range(number, 0, -1):
            try:
                return [token_id(text * several)] * (number // several)
            except ConfigError:
                continue
    raise ConfigError(
        "the vocabulary has no token for a line break, which prompts with images need"
    )


Family = Idefics3Family
