"""The base class of families whose encoder takes tiles of one size."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from vllm.multimodal.images.hf_processor import HfImageProcessor
from vllm.multimodal.images.settings import pixel_statistics, setting_bool, setting_edges
from vllm.multimodal.images.tower_config import TowerConfig, read_tower_config
from vllm.multimodal.interface.checks import is_whole, wrong_setting
from vllm.multimodal.interface.family import EncoderInput, MediaFamily, grid_of_size

_LAST_FILTER = 5
"""Pillow numbers its ways to resize from 0."""


class TiledFamily(MediaFamily):
    """Images as one or several tiles of the size that the tower takes.

    Attributes:
        tower: sizes of the tower.
    """

    towers: ClassVar[tuple[str, ...]]
    """`model_type` of the towers that the family may have."""

    default_tower: ClassVar[TowerConfig | None] = None
    """Without `vision_config` in config.json; None: the defaults of the first of `towers`."""

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        self.tower = read_tower_config(config, self.towers, self.default_tower)
        self._statistics = pixel_statistics(settings)
        resample = settings.get("resample")
        if not is_whole(resample, _LAST_FILTER, 0):
            raise wrong_setting("resample", resample, f"an integer from 0 to {_LAST_FILTER}")

    @cached_property
    def processor(self) -> HfImageProcessor:
        """The image processor, created when the first image is processed."""
        size = self.settings.get("size")
        if isinstance(size, int) and not setting_bool(self.settings, "do_center_crop"):
            # Some classes scale only the shorter side to an integer.
            size = setting_edges(self.settings, "size")
        return HfImageProcessor({**self.settings, "size": size})

    def encoder_input(
        self, tiles: npt.NDArray[np.uint8], grid: tuple[int, ...], **small: npt.NDArray[Any]
    ) -> EncoderInput:
        """Build the encoder input for the tiles [T, 3, S, S] of an image, and further small
        tensors.
        """
        size = self.tower.image_size
        assert tiles.dtype == np.uint8 and tiles.shape[1:] == (3, size, size), tiles.shape
        return EncoderInput({"pixels": tiles, "statistics": self._statistics, **small}, grid)

    def black_tiles(self, num_tiles: int) -> npt.NDArray[np.uint8]:
        """Return black tiles: zeros [num_tiles, 3, S, S]."""
        size = self.tower.image_size
        return np.zeros((num_tiles, 3, size, size), np.uint8)


class SingleTileFamily(TiledFamily):
    """Images that are one tile each, so that all have the same number of tokens."""

    grid: tuple[int]
    """Grid of every image: its number of tokens. The constructor sets it."""

    def process(self, pixels: npt.NDArray[np.uint8]) -> EncoderInput:
        return self.encoder_input(self.processor(pixels)["pixel_values"], self.grid)

    def grid_of_embeddings(self, count: int, grid: tuple[int, ...] | None) -> tuple[int, ...]:
        return grid_of_size(count, *self.grid, grid)

    def largest(self) -> EncoderInput:
        return self.encoder_input(self.black_tiles(1), self.grid)
