"""Images that keep their aspect ratio: a grid of patches, of which each block is one token.

Used by the families of Qwen-VL and GLM-V. The integers of a grid are frames, rows and columns of
patches.
"""

from collections.abc import Mapping, Sequence
from math import ceil, isqrt, sqrt
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from vllm.errors import RequestError
from vllm.multimodal.images.hf_processor import MAX_RATIO, HfImageProcessor
from vllm.multimodal.images.settings import CLASS, DEFAULTS, pixel_statistics, setting_bool
from vllm.multimodal.interface.checks import config_object, config_whole, is_whole, wrong_setting
from vllm.multimodal.interface.family import (
    EncoderInput,
    Expansion,
    MediaFamily,
    PlacedItem,
    TokenLookup,
)

_MAX_PIXELS = 2**30
_LARGEST = 2**10


class GridFamily(MediaFamily):
    """Images of any size as patches, with positions in three dimensions (M-RoPE)."""

    image_processor = "Qwen2VLImageProcessor"
    placeholder = "<|image_pad|>"
    text_of_image = "<|vision_start|><|image_pad|><|vision_end|>"
    default_patch_size: ClassVar[int] = 14
    """Patch size where config.json has none."""
    limits_count_frames: ClassVar[bool] = False
    """Whether an image counts as all frames of a patch in the limits of its pixels."""

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        vision = config_object(config, "vision_config")
        self._patch_size = self._size(vision, "patch_size", "patch_size", self.default_patch_size)
        self._frames = self._size(vision, "temporal_patch_size", "temporal_patch_size", 2)
        self._merge_size = self._size(vision, "merge_size", "spatial_merge_size", 2)
        self._limits = self._read_limits()
        if not setting_bool(settings, "do_resize"):
            raise wrong_setting("do_resize", settings.get("do_resize"), "true")
        self._statistics = pixel_statistics(settings)
        self._processor: HfImageProcessor | None = None

    def process(self, pixels: npt.NDArray[np.uint8]) -> EncoderInput:
        if self._processor is None:
            fewest, most = self._limits
            given = {**self.settings, "size": {"shortest_edge": fewest, "longest_edge": most}}
            for key in ("video_size", "video_processor_type"):
                given.pop(key, None)
            if "min_pixels" in given:  # with these settings, transformers 4 ignores `size`
                given |= {"min_pixels": fewest, "max_pixels": most}
            self._processor = HfImageProcessor(given)
        found = self._processor(pixels)
        return self._input(found["pixel_values"].astype(np.uint8), found["image_grid_thw"][0])

    def grid_of_embeddings(self, count: int, grid: tuple[int, ...] | None) -> tuple[int, ...]:
        if grid is None:
            raise RequestError(
                "embeddings of an image for this model need image_grid_thw: [1, height, width], "
                "in patches"
            )
        side = self._merge_size
        frames, rows, columns = grid
        if frames != 1 or min(rows, columns) < 1 or rows % side or columns % side:
            raise RequestError(
                f"image_grid_thw must be 1, height and width in patches, which are multiples of "
                f"{side}, got {list(grid)}"
            )
        if count != self._num_tokens(grid):
            raise RequestError(
                f"an image of image_grid_thw {list(grid)} must have {self._num_tokens(grid)} "
                f"embeddings, got {count}"
            )
        return grid

    def num_embeddings_of(self, grid: tuple[int, ...]) -> int:
        return self._num_tokens(grid)

    def expand(self, grid: tuple[int, ...], token_id: TokenLookup) -> Expansion:
        count = self._num_tokens(grid)
        return Expansion([token_id(self.placeholder)] * count, [True] * count)

    def largest(self) -> EncoderInput:
        pixels = (self._patch_size * self._merge_size) ** 2
        pixels *= self._frames if self.limits_count_frames else 1
        fewest, most = self._limits
        rows, columns = largest_grid(fewest / pixels, most / pixels)
        grid = np.array([1, rows * self._merge_size, columns * self._merge_size])
        values = 3 * self._frames * self._patch_size**2
        return self._input(np.zeros((int(grid.prod()), values), np.uint8), grid)

    def positions(self, num_tokens: int, items: Sequence[PlacedItem]) -> npt.NDArray[np.int32]:
        """Return positions [3, n] in time, height and width.

        The first position of the text after an image is the largest of the image plus 1.
        """
        found = np.empty((3, num_tokens), np.int32)
        end, following = 0, 0
        for item in items:
            frames, rows, columns = item.grid[:3]
            shape = (
                frames // len(item.runs),
                rows // self._merge_size,
                columns // self._merge_size,
            )
            for start, count in item.runs:
                _fill(found[:, end:start], following)
                following += start - end
                end = start + count
                steps = np.indices(shape).reshape(3, -1)
                steps[0] = self.time_positions(item, steps[0])
                found[:, start:end] = steps + following
                following += int(steps.max()) + 1
        _fill(found[:, end:], following)
        return found

    def time_positions(
        self, item: PlacedItem, frames: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return the positions in time of the frames of an item, starting at 0."""
        return frames

    def _num_tokens(self, grid: tuple[int, ...]) -> int:
        frames, rows, columns = grid[:3]
        return frames * rows * columns // self._merge_size**2

    def _input(self, pixels: npt.NDArray[np.uint8], grid: npt.NDArray[Any]) -> EncoderInput:
        tensors: dict[str, npt.NDArray[Any]] = {
            "pixels": pixels,
            "statistics": self._statistics,
            "grid": grid.astype(np.int32),
        }
        return EncoderInput(tensors, tuple(int(n) for n in grid))

    def _size(self, vision: Mapping[str, Any], key: str, config_key: str, default: int) -> int:
        """Return a size, after checking that the tower and the image processor agree on it."""
        size = config_whole(vision, config_key, default, _LARGEST, "vision_config.")
        if self.settings.get(key, size) != size:
            accepted = f"vision_config.{config_key} of config.json, {size}"
            raise wrong_setting(key, self.settings[key], accepted)
        return size

    def _read_limits(self) -> tuple[int, int]:
        """Return the smallest and the largest number of pixels of a resized image."""
        size = self.settings.get("size")
        if size is not None and not isinstance(size, Mapping):
            raise wrong_setting("size", size, "an object with shortest_edge and longest_edge")
        found = []
        own = {key: self.settings.get(key) for key in DEFAULTS[self.settings[CLASS]]}
        for key, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            of_size = (size or {}).get(edge, (size or {}).get(key))
            value = of_size if own.get(key) is None else own[key]
            if not is_whole(value, _MAX_PIXELS):
                name = f"size.{edge}" if own.get(key) is None else key
                raise wrong_setting(name, value, f"pixels of an image, 1 to {_MAX_PIXELS}")
            found.append(int(value))
        fewest, most = found
        if fewest > most:
            raise wrong_setting("min_pixels", fewest, f"at most max_pixels ({most})")
        return fewest, most


def _fill(positions: npt.NDArray[np.int32], first: int) -> None:
    """Assign consecutive positions to text tokens, the same in all dimensions."""
    positions[:] = np.arange(first, first + positions.shape[1])


def largest_grid(fewest: float, most: float) -> tuple[int, int]:
    """Return (rows, columns) of blocks of the grid with the most blocks.

    The sides of an image are rounded to blocks. If the result has more than `most` blocks, the
    image is scaled down, each side keeping at least a block; if it has fewer than `fewest`, the
    image is scaled up and its sides are rounded up.

    Args:
        fewest: smallest number of blocks of an image that is not scaled up.
        most: largest number of blocks of an image that is not scaled down.
    """
    blocks = int(most)
    grids = [(1, max(1, int(sqrt(most * MAX_RATIO))))] if most < MAX_RATIO else []
    for rows in range(1, isqrt(blocks) + 1):
        columns = blocks // rows
        if columns - 0.5 <= MAX_RATIO * (rows + 0.5):
            grids.append((rows, columns))
    for rows in range(1, ceil(sqrt(fewest)) + 1):
        ratio = MAX_RATIO if rows == 1 else min(MAX_RATIO, fewest / (rows - 1) ** 2)
        if fewest / rows**2 <= MAX_RATIO:
            grids.append((rows, ceil(sqrt(fewest * ratio))))
    return max(grids, key=lambda grid: grid[0] * grid[1])
