"""Images of LLaVA with the Pixtral tower (arXiv 2410.07073), which keep their aspect ratio."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.multimodal.families.llava import TowerFeatures, read_features
from vllm.multimodal.images.hf_processor import HfImageProcessor
from vllm.multimodal.images.settings import pixel_statistics, setting_bool, setting_edges
from vllm.multimodal.images.tower_config import TowerConfig, read_tower_config
from vllm.multimodal.interface.checks import wrong_config, wrong_setting
from vllm.multimodal.interface.family import EncoderInput, Expansion, MediaFamily, TokenLookup

PIXTRAL = ("pixtral",)
"""`model_type` of the tower."""


class PixtralFamily(MediaFamily):
    """Images with one token for each patch or block of patches, and one token after each row.

    The integers of a grid are frames, rows and columns of patches.
    """

    image_processor = "PixtralImageProcessor"
    placeholder = "[IMG]"
    text_of_image = "[IMG]"

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        self._patch_size = read_tower_config(config, PIXTRAL).patch_size
        self._merge_size = self.read_merge_size()
        self._statistics = pixel_statistics(settings)
        self._limits = self._read_limits()

    def read_merge_size(self) -> int:
        """Return how many rows and columns of patches form the block of one token.

        Raises:
            ConfigError: config.json has a value that cannot be used.
        """
        return 1

    @cached_property
    def processor(self) -> HfImageProcessor:
        """The image processor, created when the first image is processed."""
        cell = {"height": self._cell, "width": self._cell}
        edges = setting_edges(self.settings, "size")
        return HfImageProcessor({**self.settings, "patch_size": cell, "size": edges})

    def process(self, pixels: npt.NDArray[np.uint8]) -> EncoderInput:
        (found,) = self.processor(pixels)["pixel_values"]
        return self._input(found.astype(np.uint8))

    def expand(self, grid: tuple[int, ...], token_id: TokenLookup) -> Expansion:
        _, rows, columns = (n // self._merge_size for n in grid)
        line = [token_id(self.placeholder)] * columns + [token_id("[IMG_BREAK]")]
        token_ids = line * rows
        token_ids[-1] = token_id("[IMG_END]")
        return Expansion(token_ids, ([True] * columns + [False]) * rows)

    def largest(self) -> EncoderInput:
        height, width = (-(-edge // self._cell) * self._cell for edge in self._limits)
        return self._input(np.zeros((3, height, width), np.uint8))

    @property
    def _cell(self) -> int:
        """Height and width of a block in pixels."""
        return self._patch_size * self._merge_size

    def _input(self, pixels: npt.NDArray[np.uint8]) -> EncoderInput:
        """Build the encoder input for an image [3, height, width]: its patches, block
        after block.
        """
        side, size = self._merge_size, self._patch_size
        _, height, width = pixels.shape
        rows, columns = height // self._cell, width // self._cell
        blocks = pixels.reshape(3, rows, side, size, columns, side, size)
        patches = blocks.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3 * size**2)
        grid = (1, height // size, width // size)
        tensors = {
            "pixels": patches,
            "statistics": self._statistics,
            "grid": np.array(grid, np.int32),
        }
        return EncoderInput(tensors, grid)

    def _read_limits(self) -> tuple[int, int]:
        """Return the largest height and width of a resized image, before rounding up."""
        if not setting_bool(self.settings, "do_resize"):
            raise wrong_setting("do_resize", self.settings.get("do_resize"), "true")
        if setting_bool(self.settings, "do_center_crop"):
            raise wrong_setting("do_center_crop", True, "false")
        edges = setting_edges(self.settings, "size")
        edge = edges.get("longest_edge")
        found = (edges.get("height", 0), edges.get("width", 0)) if edge is None else (edge, edge)
        if not all(found):
            accepted = "an object with longest_edge, or with height and width"
            raise wrong_setting("size", self.settings["size"], accepted)
        return found


def pixtral_features(config: Mapping[str, Any], tower: TowerConfig) -> TowerFeatures:
    """Read from config.json which hidden states of the tower are used; by default the last.

    Raises:
        ConfigError: there is no such layer, or the first patch would be left out.
    """
    given = {key: value for key, value in config.items() if value is not None}
    defaults = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    features = read_features({**defaults, **given}, tower)
    if features.drops_first:
        raise wrong_config("vision_feature_select_strategy", "default", "'full'")
    return features


Family = PixtralFamily
