"""Runs the image processors of transformers, which here only resize and crop.

Of the two variants of each, the one that works with Pillow is used: its results are the same in all
releases, and torchvision is missing in many installations. transformers is imported when the first
one is created.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.errors import ConfigError, RequestError

MAX_RATIO = 200
"""Largest ratio of the longer to the shorter side of an image. Processors that scale the shorter
side to a fixed size would need memory without bound."""


class HfImageProcessor:
    """An image processor of transformers that does not normalise pixels: they remain 0 to 255.

    Args:
        settings: settings from `vllm.multimodal.images.settings.with_defaults`.

    Raises:
        ConfigError: Pillow is not installed, this release of transformers does not have the class,
            or the class does not accept the settings.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        given = {key: value for key, value in settings.items() if value is not None}
        name = given.pop("image_processor_type")
        self._processor = make_image_processor(
            name, {**given, "do_rescale": False, "do_normalize": False}
        )

    def __call__(
        self, pixels: npt.NDArray[np.uint8], **options: bool
    ) -> dict[str, npt.NDArray[Any]]:
        """Process one image; return the arrays of the result by name.

        Args:
            pixels: [height, width, 3] in RGB.
            options: options of the call, which are not settings of the class.

        Raises:
            RequestError: one side is more than MAX_RATIO times the other, or the processor does
                not accept the image.
        """
        check_ratio(pixels)
        height, width = pixels.shape[:2]
        try:
            found = self._processor.preprocess(
                images=[pixels], input_data_format="channels_last", return_tensors="np", **options
            )
        except ValueError as error:
            raise RequestError(
                f"an image of {width} x {height} pixels cannot be used: {_first_line(error)}"
            ) from error
        return {key: np.asarray(value) for key, value in found.items()}


def check_ratio(pixels: npt.NDArray[np.uint8]) -> None:
    """Check that an image has pixels, and is not much longer than wide or the reverse.

    Raises:
        RequestError: one side is more than MAX_RATIO times the other.
    """
    height, width = pixels.shape[:2]
    if min(height, width) < 1 or max(height, width) > MAX_RATIO * min(height, width):
        raise RequestError(
            f"an image of {width} x {height} pixels cannot be used: one side may be at most "
            f"{MAX_RATIO} times the other"
        )


def make_image_processor(name: str, settings: Mapping[str, Any]) -> Any:
    """Create an image processor of transformers that works with Pillow.

    Args:
        name: name of its class without the endings Fast and Pil, such as CLIPImageProcessor.
        settings: settings of the class.

    Raises:
        ConfigError: see `HfImageProcessor`.
    """
    if find_spec("PIL") is None:
        raise ConfigError("images need Pillow, which is not installed: pip install 'vllm[image]'")
    import transformers

    # transformers 5 has two classes for each processor. In version 4, the one without a suffix uses
    # Pillow.
    class_ = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name, None)
    if class_ is None:
        raise ConfigError(
            f"transformers {transformers.__version__} has no {name}: install a later version"
        )
    try:
        return class_(**settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} of transformers {transformers.__version__} does not accept the settings of "
            f"this model: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
