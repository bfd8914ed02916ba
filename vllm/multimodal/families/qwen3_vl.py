"""Images of Qwen3-VL (arXiv 2511.21631)."""

from typing import ClassVar

from vllm.multimodal.images.grid_family import GridFamily


class Qwen3VLFamily(GridFamily):
    """An image is a grid of patches of 16 pixels, and blocks of 2 x 2 patches are tokens."""

    default_patch_size: ClassVar[int] = 16


Family = Qwen3VLFamily
