"""Images for examples."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm import envs
from vllm.assets.base import find_asset
from vllm.multimodal.images.image import read_image
from vllm.utils.media import read_file

if TYPE_CHECKING:
    from PIL.Image import Image

_PACKAGED = Path(__file__).parent / "images"


@dataclass(frozen=True)
class ImageAsset:
    """An image: "stop_sign" or "cherry_blossom" of the package, or one of your own.

    The images of the package are drawings of 256 x 256 pixels. Photographs of your own, in the
    folder `VLLM_ASSETS_CACHE`, take precedence.

    Attributes:
        name: name of the file, without its suffix.
    """

    name: str

    @property
    def path(self) -> Path:
        """Path of the file.

        Raises:
            RequestError: there is none of this name.
        """
        return find_asset(self.name, (".jpg", ".png"), _PACKAGED)

    @property
    def pil_image(self) -> "Image":
        """The image as a Pillow image in mode RGB.

        Raises:
            RequestError: there is none of this name, or Pillow is not installed.
        """
        limit = envs.get().VLLM_MAX_IMAGE_PIXELS
        return read_image(read_file(self.path), max_pixels=limit, where=str(self.path))
