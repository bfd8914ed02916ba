"""Images and videos of Qwen3-VL (arXiv 2511.21631)."""

from collections.abc import Mapping
from typing import ClassVar

from vllm.multimodal.video.grid_videos import StampedVideoFamily


class Qwen3VLFamily(StampedVideoFamily):
    """An image is a grid of patches of 16 pixels, and blocks of 2 x 2 patches are tokens."""

    default_patch_size: ClassVar[int] = 16
    default_video_size: ClassVar[Mapping[str, int]] = {
        "shortest_edge": 128 * 32 * 32,
        "longest_edge": 768 * 32 * 32,
    }


Family = Qwen3VLFamily
