"""Images and videos of Qwen3-VL (arXiv 2511.21631)."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from vllm.multimodal.interface.checks import config_object, layer_indices
from vllm.multimodal.video.grid_videos import StampedVideoFamily, tenths

_DEEP_LAYERS = (8, 16, 24)


def read_deep_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Read the layers of the tower whose features the language model also reads (DeepStack).

    Raises:
        ConfigError: config.json has no valid list of layers.
    """
    vision = config_object(config, "vision_config")
    return layer_indices(vision, "deepstack_visual_indexes", _DEEP_LAYERS)


class Qwen3VLFamily(StampedVideoFamily):
    """Images are grids of 16-pixel patches; each block of 2 x 2 patches is a token."""

    default_patch_size: ClassVar[int] = 16
    default_video_size: ClassVar[Mapping[str, int]] = {
        "shortest_edge": 128 * 32 * 32,
        "longest_edge": 768 * 32 * 32,
    }

    frame_marks: ClassVar[tuple[str, str]] = ("<|vision_start|>", "<|vision_end|>")

    def around(self, modality: str) -> tuple[str, str] | None:
        return self.frame_marks if modality == "video" else None

    def time_of(self, seconds: npt.NDArray[np.float64]) -> tuple[int, ...]:
        """Return the middle of each frame of the grid, in tenths of a second."""
        return tuple(map(tenths, ((seconds[:, 0] + seconds[:, -1]) / 2).tolist()))

    @property
    def num_added(self) -> int:
        return len(read_deep_layers(self.config))


Family = Qwen3VLFamily
