"""Images and videos of GLM-4.1V (arXiv 2507.01006), GLM-4.5V and GLM-4.6V."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from vllm.multimodal.video.grid_videos import StampedVideoFamily, in_tenths, tenths

_IN_TENTHS = "Glm46V"
"""Beginning of the class of the video processor of GLM-4.6V, which writes tenths of a second."""


class Glm4vFamily(StampedVideoFamily):
    """Images are grids of 14-pixel patches; each block of 2 x 2 patches is a token.

    Frames of a video are images, each followed by the time of its first frame in seconds.
    """

    image_processor = "Glm4vImageProcessor"
    placeholder = "<|image|>"
    text_of_image = "<|begin_of_image|><|image|><|end_of_image|>"
    video_placeholder: ClassVar[str] = "<|video|>"
    limits_count_frames: ClassVar[bool] = True
    default_video_size: ClassVar[Mapping[str, int]] = {
        "shortest_edge": 112 * 112,
        "longest_edge": 30000 * 2 * 28 * 28,
    }
    frame_marks: ClassVar[tuple[str, str]] = ("<|begin_of_image|>", "<|end_of_image|>")
    has_stamp_first: ClassVar[bool] = False

    @property
    def frame_placeholder(self) -> str:
        return self.placeholder

    def text_of(self, modality: str) -> str:
        if modality == "video":
            return f"<|begin_of_video|>{self.video_placeholder}<|end_of_video|>"
        return self.text_of_image

    def time_of(self, seconds: npt.NDArray[np.float64]) -> tuple[int, ...]:
        """Return when each frame of the grid begins, in seconds or in tenths of a second."""
        return tuple(map(tenths if self._is_in_tenths else int, seconds[:, 0].tolist()))

    def stamp(self, time: int) -> str:
        return f"{in_tenths(time)} seconds" if self._is_in_tenths else str(time)

    @property
    def _is_in_tenths(self) -> bool:
        return str(self.settings.get("video_processor_type")).startswith(_IN_TENTHS)


Family = Glm4vFamily
