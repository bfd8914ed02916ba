"""Videos as grids of patches with time: pairs of frames are encoded by the image tower.

The integers of the grid of a video are frames, rows and columns of patches, and further ones about
time, which depend on the family. An image has only the first three.
"""

from collections.abc import Mapping
from fractions import Fraction
from functools import cached_property
from math import ceil, floor, sqrt
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from vllm.errors import RequestError
from vllm.multimodal.images.grid_family import GridFamily, largest_grid
from vllm.multimodal.images.hf_processor import check_ratio
from vllm.multimodal.interface.checks import config_object, config_whole, is_whole, wrong_setting
from vllm.multimodal.interface.family import (
    EncoderInput,
    Expansion,
    PlacedItem,
    TokenLookup,
    VideoFrames,
)

if TYPE_CHECKING:
    from PIL.Image import Resampling

_MAX_PIXELS = 2**32
_SIZE_GRID = 3
"""Integers of a grid that are sizes."""
_LARGEST_DENOMINATOR = 2**20


class GridVideoFamily(GridFamily):
    """Images and videos of any size as patches of frames."""

    modalities: ClassVar[tuple[str, ...]] = ("image", "video")
    video_placeholder: ClassVar[str] = "<|video_pad|>"
    default_video_size: ClassVar[Mapping[str, int]] = {
        "shortest_edge": 128 * 28 * 28,
        "longest_edge": 768 * 28 * 28,
    }
    """Fewest and most pixels where the settings of videos do not say them."""
    limits_whole_video: ClassVar[bool] = False
    """Whether the limits hold for the pixels of all frames together, and not for each frame."""

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        self._video_limits = self._read_video_limits()

    def placeholder_of(self, modality: str) -> str:
        return self.video_placeholder if modality == "video" else self.placeholder

    def text_of(self, modality: str) -> str:
        return self.text_of_image.replace(self.placeholder, self.placeholder_of(modality))

    def process_video(self, frames: VideoFrames) -> EncoderInput:
        check_ratio(frames.pixels[0])
        count, height, width, _ = frames.pixels.shape
        height, width = self._fitted(count, height, width)
        resized = np.empty((count, height, width, 3), np.uint8)
        for index, frame in enumerate(frames.pixels):
            resized[index] = _resize(frame, height, width, self._resample)
        missing = -count % self._frames
        pixels = np.concatenate([resized, *[resized[-1:]] * missing])
        seconds = np.concatenate([frames.seconds, *[frames.seconds[-1:]] * missing])
        patches, grid = self._as_patches(pixels)
        return self._video_input(patches, grid, self.time_of(seconds.reshape(-1, self._frames)))

    def time_of(self, seconds: npt.NDArray[np.float64]) -> tuple[int, ...]:
        """Return the integers that describe, in a grid, when its frames are shown.

        Args:
            seconds: [frames of the grid, frames of a patch].
        """
        return (0,)

    def expand(self, grid: tuple[int, ...], token_id: TokenLookup) -> Expansion:
        if len(grid) == _SIZE_GRID:
            return super().expand(grid, token_id)
        count = self._num_tokens(grid)
        return Expansion([token_id(self.video_placeholder)] * count, [True] * count)

    def num_parts(self, grid: tuple[int, ...]) -> int:
        return grid[0]

    def largest_of(self, modality: str, max_frames: int) -> EncoderInput:
        if modality != "video":
            return self.largest()
        candidates = [self._largest_video(count) for count in {self._frames, max_frames}]
        return max(candidates, key=lambda each: each.tensors["pixels"].nbytes)

    def _largest_video(self, count: int) -> EncoderInput:
        """Return the largest black video with this number of frames. Its pixels take no memory."""
        pixels = self._cell**2 * (count if self.limits_whole_video else 1)
        fewest, most = self._video_limits
        rows, columns = largest_grid(fewest / pixels, most / pixels)
        frames = ceil(count / self._frames)
        grid = (frames, rows * self._merge_size, columns * self._merge_size)
        values = 3 * self._frames * self._patch_size**2
        black = np.broadcast_to(np.uint8(0), (int(np.prod(grid)), values))
        seconds = np.arange(frames * self._frames, dtype=np.float64)
        return self._video_input(black, grid, self.time_of(seconds.reshape(frames, -1)))

    @property
    def _cell(self) -> int:
        """Height and width in pixels of the block of patches that becomes a token."""
        return self._patch_size * self._merge_size

    @cached_property
    def _resample(self) -> "Resampling":
        """The resampling method for resizing."""
        from PIL.Image import Resampling

        given = self.settings.get("resample")
        if not isinstance(given, int) or given not in [each.value for each in Resampling]:
            accepted = f"one of {', '.join(f'{each.value} ({each.name})' for each in Resampling)}"
            raise wrong_setting("resample", given, accepted)
        return Resampling(given)

    def _fitted(self, count: int, height: int, width: int) -> tuple[int, int]:
        """Return height and width of resized frames: whole blocks, within the limits."""
        cell, (fewest, most) = self._cell, self._video_limits
        frames = rounded = 1
        if self.limits_whole_video:
            frames = max(count, self._frames)
            rounded = round(frames / self._frames) * self._frames
            if min(height, width) < cell:
                scale = cell / min(height, width)
                height, width = int(height * scale), int(width * scale)
        fitted = round(height / cell) * cell, round(width / cell) * cell
        area = rounded * fitted[0] * fitted[1]
        if fewest <= area <= most:
            return fitted
        if area > most:
            scale = sqrt(most / (frames * height * width))
            edges = (max(1, floor(edge * scale / cell)) * cell for edge in (height, width))
        else:
            scale = sqrt(fewest / (frames * height * width))
            edges = (ceil(edge * scale / cell) * cell for edge in (height, width))
        fitted_height, fitted_width = edges
        return fitted_height, fitted_width

    def _as_patches(
        self, pixels: npt.NDArray[np.uint8]
    ) -> tuple[npt.NDArray[np.uint8], tuple[int, int, int]]:
        """Divide frames [n, H, W, 3] into patches, block after block; return them and
        their grid.
        """
        size, side, deep = self._patch_size, self._merge_size, self._frames
        count, height, width, _ = pixels.shape
        grid = (count // deep, height // size, width // size)
        shape = (grid[0], deep, grid[1] // side, side, size, grid[2] // side, side, size, 3)
        order = (0, 2, 5, 3, 6, 8, 1, 4, 7)
        patches = pixels.reshape(shape).transpose(order).reshape(-1, 3 * deep * size**2)
        return patches, grid

    def _video_input(
        self, patches: npt.NDArray[np.uint8], grid: tuple[int, ...], time: tuple[int, ...]
    ) -> EncoderInput:
        found = self._input(patches, np.array(grid))
        return EncoderInput(found.tensors, (*found.grid, *time))

    def _read_video_limits(self) -> tuple[int, int]:
        """Return the smallest and the largest number of pixels of resized frames."""
        given = self.settings.get("video_size")
        if given is None:
            return self._limits
        if not isinstance(given, Mapping):
            raise wrong_setting("video_size", given, "an object with shortest_edge, longest_edge")
        size = {**self.default_video_size, **given}
        fewest, most = size["shortest_edge"], size["longest_edge"]
        for key, value in size.items():
            if key not in self.default_video_size or not is_whole(value, _MAX_PIXELS):
                accepted = f"pixels of a video, 1 to {_MAX_PIXELS}"
                raise wrong_setting(f"video_size.{key}", value, accepted)
        if fewest > most:
            accepted = f"at most longest_edge ({most})"
            raise wrong_setting("video_size.shortest_edge", fewest, accepted)
        return fewest, most


class TimedVideoFamily(GridVideoFamily):
    """Videos whose positions in time are in proportion to the seconds between frames.

    The last two integers of a grid are the seconds from one frame of the grid to the next, as
    numerator and denominator.
    """

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        vision = config_object(config, "vision_config")
        self._positions_per_second = config_whole(
            vision, "tokens_per_second", 4, 2**10, "vision_config."
        )

    def time_of(self, seconds: npt.NDArray[np.float64]) -> tuple[int, ...]:
        flat = seconds.flatten()
        steps = np.diff(flat)
        steps = steps[steps > 0]  # a repeated frame at the end has a duration of 0
        between = float(steps.mean()) if len(steps) else 0.5
        exact = Fraction(between * seconds.shape[1]).limit_denominator(_LARGEST_DENOMINATOR)
        return exact.numerator, exact.denominator

    def time_positions(
        self, item: PlacedItem, frames: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        if len(item.grid) == _SIZE_GRID:
            return frames
        numerator, denominator = item.grid[_SIZE_GRID:]
        return frames * (self._positions_per_second * numerator) // denominator


class StampedVideoFamily(GridVideoFamily):
    """Videos in which the time of each frame is part of the prompt, as text.

    The last integers of a grid are these times, in a unit of the family.
    """

    limits_whole_video: ClassVar[bool] = True
    frame_marks: ClassVar[tuple[str, str]]
    """Tokens before and after the tokens of a frame of the grid."""
    has_stamp_first: ClassVar[bool] = True
    """Whether the time stands before the frame, and not after it."""

    @property
    def frame_placeholder(self) -> str:
        """Text of the token that represents an embedding of a video."""
        return self.video_placeholder

    def stamp(self, time: int) -> str:
        """Return the text for a time in a grid."""
        return f"<{in_tenths(time)} seconds>"

    def expand(self, grid: tuple[int, ...], token_id: TokenLookup) -> Expansion:
        if len(grid) == _SIZE_GRID:
            return super().expand(grid, token_id)
        count = self._num_tokens((1, *grid[1:]))
        begin, end = map(token_id, self.frame_marks)
        frame = [begin, *[token_id(self.frame_placeholder)] * count, end]
        is_embedding = [False, *[True] * count, False]
        token_ids, are_embeddings = list[int](), list[bool]()
        for time in grid[_SIZE_GRID:]:
            stamp = token_id.text(self.stamp(time))
            parts = [(stamp, [False] * len(stamp)), (frame, is_embedding)]
            for tokens, flags in parts if self.has_stamp_first else reversed(parts):
                token_ids += tokens
                are_embeddings += flags
        return Expansion(token_ids, are_embeddings)


def tenths(seconds: float) -> int:
    """Convert seconds to integer tenths, rounded like text with one digit."""
    return int(f"{seconds:.1f}".replace(".", ""))


def in_tenths(number: int) -> str:
    """Format a number of tenths as a decimal fraction."""
    return f"{number // 10}.{number % 10}"


def _resize(
    frame: npt.NDArray[np.uint8], height: int, width: int, resample: "Resampling"
) -> npt.NDArray[np.uint8]:
    from PIL import Image as pillow

    if frame.shape[:2] == (height, width):
        return frame
    try:
        return np.asarray(pillow.fromarray(frame).resize((width, height), resample))
    except ValueError as error:
        raise RequestError(f"its frames cannot be resized: {error}") from error
