"""Images and videos of Qwen2.5-VL (arXiv 2502.13923)."""

from vllm.multimodal.video.grid_videos import TimedVideoFamily


class Qwen2_5VLFamily(TimedVideoFamily):
    """Images are grids of 14-pixel patches; each block of 2 x 2 patches is a token."""


Family = Qwen2_5VLFamily
