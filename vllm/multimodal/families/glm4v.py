"""Images of GLM-4.1V (arXiv 2507.01006)."""

from typing import ClassVar

from vllm.multimodal.images.grid_family import GridFamily


class Glm4vFamily(GridFamily):
    """An image is a grid of patches of 14 pixels, and blocks of 2 x 2 patches are tokens."""

    placeholder = "<|image|>"
    text_of_image = "<|begin_of_image|><|image|><|end_of_image|>"
    limits_count_frames: ClassVar[bool] = True


Family = Glm4vFamily
