"""Images and sounds for the bodies of requests: fetched from where they are, and as base64."""

import base64
import binascii
import io
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes, urlsplit

from numpy.typing import NDArray

from vllm import envs
from vllm.errors import RequestError
from vllm.utils.media import Samples, read_image, read_wav, write_wav

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_BYTES = 256 * 2**20


def fetch_image(image_url: str, *, image_mode: str = "RGB") -> "Image":
    """The image at an address: http:, https: or data:.

    Raises:
        RequestError: it cannot be fetched or is no image, or Pillow is not installed.
    """
    return read_image(_fetch(image_url, envs.get().VLLM_IMAGE_FETCH_TIMEOUT), image_mode)


def fetch_audio(audio_url: str) -> tuple[Samples, int]:
    """The sound at an address, http:, https: or data:, as samples and their rate.

    Raises:
        RequestError: it cannot be fetched or is no WAV file.
    """
    return read_wav(_fetch(audio_url, envs.get().VLLM_AUDIO_FETCH_TIMEOUT))


def encode_image_base64(image: "Image", *, image_mode: str = "RGB", format: str = "JPEG") -> str:
    """An image of Pillow as the base64 text of a file.

    Args:
        image: stays as it is.
        image_mode: of the file.
        format: of the file, as Pillow names it.
    """
    buffer = io.BytesIO()
    image.convert(image_mode).save(buffer, format)
    return base64.b64encode(buffer.getvalue()).decode()


def encode_audio_base64(audio: NDArray[Any], sampling_rate: int) -> str:
    """Samples as the base64 text of a WAV file; see `vllm.utils.media.write_wav`."""
    return base64.b64encode(write_wav(audio, sampling_rate)).decode()


def _fetch(url: str, timeout_s: int) -> bytes:
    scheme = urlsplit(url).scheme
    if scheme == "data":
        return _read_data_url(url)
    if scheme not in ("http", "https"):
        raise RequestError(f"{url[:200]!r} must begin with http:, https: or data:")
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            data: bytes = response.read(_MAX_BYTES + 1)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise RequestError(f"cannot fetch {url[:200]!r}: {error}") from error
    if len(data) > _MAX_BYTES:
        raise RequestError(f"{url[:200]!r} is larger than {_MAX_BYTES // 2**20} MiB")
    return data


def _read_data_url(url: str) -> bytes:
    head, comma, data = url.partition(",")
    if not comma:
        raise RequestError("a data: URL must have a comma in front of its data")
    raw = unquote_to_bytes(data)
    if not head.endswith(";base64"):
        return raw
    try:
        return base64.b64decode(raw, validate=True)
    except binascii.Error as error:
        raise RequestError(f"the data: URL does not hold base64: {error}") from None
