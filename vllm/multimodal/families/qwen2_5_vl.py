"""Images and videos of Qwen2.5-VL (arXiv 2502.13923)."""

from vllm.multimodal.video.grid_videos import TimedVideoFamily


class Qwen2_5VLFamily(TimedVideoFamily):
    """An image is a grid of patches of 14 pixels, and blocks of 2 x 2 patches are tokens."""


Family = Qwen2_5VLFamily
