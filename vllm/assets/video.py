"""Videos for examples."""

from dataclasses import dataclass
from pathlib import Path

from vllm.assets.base import find_asset
from vllm.utils.media import Frames, read_video


@dataclass(frozen=True)
class VideoAsset:
    """A video: a file in the folder that `VLLM_ASSETS_CACHE` names. The package has none.

    Attributes:
        name: name of the file; the suffix .mp4 may be left out.
        num_frames: largest number of frames, spread evenly over the length; -1: all.
    """

    name: str
    num_frames: int = -1

    @property
    def path(self) -> Path:
        """Path of the file.

        Raises:
            RequestError: there is none of this name.
        """
        return find_asset(self.name.removesuffix(".mp4"), (".mp4",))

    @property
    def np_ndarrays(self) -> Frames:
        """The frames of the video, [frames, height, width, 3] in RGB.

        Raises:
            RequestError: there is no such file, it is not a video, or OpenCV is not installed.
        """
        return read_video(self.path, self.num_frames)
