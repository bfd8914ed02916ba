"""Images and videos of Qwen2-VL (arXiv 2409.12191)."""

from vllm.multimodal.video.grid_videos import GridVideoFamily


class Qwen2VLFamily(GridVideoFamily):
    """An image is a grid of patches of 14 pixels, and blocks of 2 x 2 patches are tokens."""


Family = Qwen2VLFamily
