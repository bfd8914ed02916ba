"""Images and videos of Qwen2-VL (arXiv 2409.12191)."""

from vllm.multimodal.video.grid_videos import GridVideoFamily


class Qwen2VLFamily(GridVideoFamily):
    """Images are grids of 14-pixel patches; each block of 2 x 2 patches is a token."""


Family = Qwen2VLFamily
