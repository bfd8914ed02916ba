"""Fetches images and sounds from URLs, and encodes them as base64 for request bodies."""

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from vllm import envs
from vllm.multimodal.fetching.fetch import MAX_REDIRECTS, MediaFetcher
from vllm.multimodal.images.image import read_image, to_rgb
from vllm.utils.media import Samples, read_wav, write_wav

if TYPE_CHECKING:
    from PIL.Image import Image


def make_fetcher(
    allowed_local_media_path: str | None = None, allowed_media_domains: Sequence[str] | None = None
) -> MediaFetcher:
    """Create a fetcher with the limits of the environment variables.

    Args:
        allowed_local_media_path: folder whose files file: URLs may name; None: no files.
        allowed_media_domains: the only hosts that are allowed; their addresses may be private.
            None: every public host.

    Raises:
        ConfigError: the folder does not exist, or a domain is malformed.
    """
    values = envs.get()
    return MediaFetcher(
        allowed_local_media_path,
        allowed_media_domains or (),
        timeout_s={
            "image": values.VLLM_IMAGE_FETCH_TIMEOUT,
            "audio": values.VLLM_AUDIO_FETCH_TIMEOUT,
            "video": values.VLLM_VIDEO_FETCH_TIMEOUT,
        },
        max_redirects=MAX_REDIRECTS if values.VLLM_MEDIA_URL_ALLOW_REDIRECTS else 0,
    )


def fetch_image(
    image_url: str,
    *,
    image_mode: str = "RGB",
    allowed_local_media_path: str | None = None,
    allowed_media_domains: Sequence[str] | None = None,
) -> "Image":
    """Fetch an image from a URL: http:, https:, data: or file:.

    Args:
        image_url: URL of the image.
        image_mode: mode of Pillow; with "RGB", transparent pixels become white.
        allowed_local_media_path: folder; see `make_fetcher`.
        allowed_media_domains: hosts; see `make_fetcher`.

    Raises:
        RequestError: it cannot be fetched or is not an image, or Pillow is not installed.
    """
    fetcher = make_fetcher(allowed_local_media_path, allowed_media_domains)
    data = fetcher.fetch_sync(image_url, "image", "image_url")
    limit = envs.get().VLLM_MAX_IMAGE_PIXELS
    return read_image(data, image_mode, max_pixels=limit, where="image_url")


def fetch_audio(
    audio_url: str,
    *,
    allowed_local_media_path: str | None = None,
    allowed_media_domains: Sequence[str] | None = None,
) -> tuple[Samples, int]:
    """Fetch a sound from a URL; return its samples, and the samples per second.

    Args:
        audio_url: http:, https:, data: or file:.
        allowed_local_media_path: folder; see `make_fetcher`.
        allowed_media_domains: hosts; see `make_fetcher`.

    Raises:
        RequestError: it cannot be fetched or is not a WAV file.
    """
    fetcher = make_fetcher(allowed_local_media_path, allowed_media_domains)
    return read_wav(fetcher.fetch_sync(audio_url, "audio", "audio_url"))


def encode_image_base64(image: "Image", *, image_mode: str = "RGB", format: str = "JPEG") -> str:
    """Encode a Pillow image as the base64 text of a file.

    Args:
        image: is not changed.
        image_mode: mode of the file; with "RGB", transparent pixels become white.
        format: format of the file, as Pillow names it.
    """
    buffer = io.BytesIO()
    file = to_rgb(image) if image_mode == "RGB" else image.convert(image_mode)
    file.save(buffer, format)
    return base64.b64encode(buffer.getvalue()).decode()


def encode_audio_base64(audio: NDArray[Any], sampling_rate: int) -> str:
    """Encode samples as the base64 text of a WAV file; see `vllm.utils.media.write_wav`."""
    return base64.b64encode(write_wav(audio, sampling_rate)).decode()
