"""Images: the supported formats, and decoding files to pixels in RGB.

Pillow is imported when it is needed. A file is not trusted: only decoders of the supported formats
are used, and the size in its header is checked before any pixel is decoded.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vllm.errors import RequestError
from vllm.multimodal.interface.source import MediaSource, refuse

if TYPE_CHECKING:
    from PIL.Image import Image

ACCEPTED = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
"""Formats by the names that Pillow has for them. AVIF needs a Pillow that was built with it."""

MAX_ASPECT_RATIO = 200
"""Longest edge / shortest edge. The image processors of several models fail above it."""

Color = tuple[int, int, int]
WHITE: Color = (255, 255, 255)

_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", "PNG"),
    (0, b"\xff\xd8\xff", "JPEG"),
    (0, b"GIF87a", "GIF"),
    (0, b"GIF89a", "GIF"),
    (0, b"BM", "BMP"),
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (8, b"WEBP", "WEBP"),
    # Formats that are refused; the error names them.
    (0, b"%PDF", "PDF"),
    (0, b"%!PS", "PostScript"),
    (0, b"\xc5\xd0\xd3\xc6", "EPS"),
    (0, b"\xd7\xcd\xc6\x9a", "WMF"),
    (40, b" EMF", "EMF"),
    (0, b"8BPS", "Photoshop"),
    (0, b"\0\0\1\0", "ICO"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"\0\0\0\x0cJXL ", "JPEG XL"),
    (0, b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (0, b"PK\3\4", "ZIP"),
    (0, b"\x1f\x8b", "gzip"),
)
"""Offset, bytes at this offset, format."""
_MARKUP = ((b"<svg", "SVG"), (b"<html", "HTML"), (b"<!doctype html", "HTML"), (b"<?xml", "XML"))
_HEAD_BYTES = 1024

_PNG_DEPTH = 24
"""Offset of the bits of a sample in a PNG file; the color type follows."""
_PNG_GRAY, _PNG_RGB = 0, 2
_PILLOW_LIMIT = 2 * 89478485
"""Pixels above which Pillow refuses to open an image."""
_MAX_REASON_CHARS = 200
"""Longest part of a message of Pillow that is shown: it may have bytes of the file in it."""
_ORIENTATION = 0x0112
_ALPHA_MODES = ("RGBA", "LA", "PA", "RGBa", "La")
_STRAIGHT_ALPHA = {"RGBa": "RGBA", "La": "LA"}
"""Mode with colors multiplied by alpha -> the mode without that."""


def load_decoders() -> None:
    """Import Pillow and its installed decoders, for the children of this process.

    AVIF decoders start no threads then, whose stacks would count as memory.
    """
    with suppress(ImportError):
        from PIL import Image as pillow

        pillow.init()
        # This package checks its own limit of pixels, so switch off Pillow's warning about a lower
        # one.
        warnings.simplefilter("ignore", pillow.DecompressionBombWarning)
        from PIL import AvifImagePlugin

        AvifImagePlugin.DEFAULT_MAX_THREADS = 1


def sniff(data: bytes) -> str | None:
    """Return the format of a file by its first bytes, supported or not; None: unknown.

    >>> sniff(b"GIF89a..."), sniff(b"%PDF-1.7"), sniff(b"?")
    ('GIF', 'PDF', None)
    """
    for offset, signature, name in _SIGNATURES:
        if data.startswith(signature, offset) and (name != "WEBP" or data[:4] == b"RIFF"):
            return name
    if data[4:8] == b"ftyp":
        brands = data[8 : min(int.from_bytes(data[:4], "big"), 256)]
        is_avif = any(brands[i : i + 4] in (b"avif", b"avis") for i in range(0, len(brands), 4))
        return "AVIF" if is_avif else "HEIC or a video"
    head = data[:_HEAD_BYTES].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if head.startswith(b"<"):
        return next((name for tag, name in _MARKUP if tag in head), "XML")
    return None


def decode_image(
    data: bytes, *, max_pixels: int, background: Color = WHITE, where: str = "the image"
) -> NDArray[np.uint8]:
    """Decode an image file to pixels [H, W, 3] in RGB.

    The first frame of an animation is used. Color profiles are ignored.

    Args:
        data: content of the file.
        max_pixels: limit of width x height.
        background: color of transparent pixels.
        where: name of the item in error messages.

    Raises:
        RequestError: the format is not supported, the file is damaged or incomplete, the image is
            too large, or Pillow is not installed.
    """
    image = to_rgb(_open(data, max_pixels, where), background, where)
    with _decoding(image.format, where):
        return np.array(image)


def image_pixels(
    source: MediaSource, *, max_pixels: int, background: Color = WHITE
) -> NDArray[np.uint8]:
    """Return the pixels of an image of a request, [H, W, 3] in RGB.

    Args:
        source: a file, or pixels; both have the same size limits.
        max_pixels: maximum number of pixels; see `decode_image`.
        background: background color; see `decode_image`.

    Raises:
        RequestError: see `decode_image`.
    """
    if source.pixels is None:
        data = source.data or b""
        return decode_image(data, max_pixels=max_pixels, background=background, where=source.where)
    height, width, _ = source.pixels.shape
    _check_size(width, height, max_pixels, source.where)
    return source.pixels


def read_image(
    data: bytes, mode: str = "RGB", *, max_pixels: int, where: str = "the image"
) -> "Image":
    """Decode an image file to a Pillow image, upright and without metadata.

    Args:
        data: content of the file.
        mode: mode of Pillow; with "RGB", transparent pixels become white.
        max_pixels: limit of width x height.
        where: name of the item in error messages.

    Raises:
        RequestError: see `decode_image`.
    """
    image = _open(data, max_pixels, where)
    if mode == "RGB":
        return to_rgb(image, where=where)
    with _decoding(image.format, where):
        return _without_metadata(_upright(image).convert(mode))


def to_rgb(image: "Image", background: Color = WHITE, where: str = "the image") -> "Image":
    """Convert a Pillow image to mode RGB, upright, without metadata.

    16-bit gray is scaled to 8 bits: for the modes I;16 always, for the mode I if a value is above
    255.

    Args:
        image: image of any mode except F; not changed.
        background: color of transparent pixels.
        where: name of the item in error messages.

    Raises:
        RequestError: its mode is F, or its file, which Pillow reads here, is damaged.
    """
    with _decoding(image.format, where):
        return _to_rgb(_upright(image), background, where)


def _to_rgb(image: "Image", background: Color, where: str) -> "Image":
    from PIL import Image as pillow

    if image.mode.startswith("I"):
        return pillow.fromarray(_gray16_to_rgb(image, background))
    if image.mode == "F":
        raise refuse(
            where, "its pixels are floating-point values of unknown range. Convert it to 8 bits"
        )
    if image.mode in _ALPHA_MODES or "transparency" in image.info:
        straight = image.convert(_STRAIGHT_ALPHA.get(image.mode, image.mode))
        base = pillow.new("RGBA", image.size, (*background, 255))
        base.alpha_composite(straight.convert("RGBA"))
        image = base
    return _without_metadata(image.convert("RGB"))


def _gray16_to_rgb(image: "Image", background: Color) -> NDArray[np.uint8]:
    values = np.asarray(image)
    is_16_bit = image.mode != "I" or values.max() > 255
    gray = values.clip(0, 65535)
    if is_16_bit:
        gray = (gray.astype(np.uint32) + 128) // 257
    pixels = np.repeat(gray.astype(np.uint8)[:, :, None], 3, axis=2)
    if isinstance(clear := image.info.get("transparency"), int):
        pixels[values == clear] = background
    return pixels


def _without_metadata(image: "Image") -> "Image":
    """Remove the metadata of a new image, which would otherwise be applied again later."""
    image.info = {}
    return image


def _upright(image: "Image") -> "Image":
    """Return the image with its pixels loaded, rotated according to its EXIF orientation."""
    from PIL import Image as pillow

    image.load()
    turn = pillow.Transpose
    method = {
        2: turn.FLIP_LEFT_RIGHT,
        3: turn.ROTATE_180,
        4: turn.FLIP_TOP_BOTTOM,
        5: turn.TRANSPOSE,
        6: turn.ROTATE_270,
        7: turn.TRANSVERSE,
        8: turn.ROTATE_90,
    }.get(_orientation(image))
    return image if method is None else image.transpose(method)


def _orientation(image: "Image") -> int:
    try:
        found = image.getexif().get(_ORIENTATION)
    except Exception:  # Pillow may raise anything for damaged metadata, but the pixels are valid
        return 1
    return found if isinstance(found, int) else 1


def _open(data: bytes, max_pixels: int, where: str) -> "Image":
    """Open the image of a file and check its size, without decoding pixels."""
    try:
        from PIL import Image as pillow
    except ImportError:
        raise RequestError(
            "images need Pillow, which is not installed: pip install 'vllm[image]'"
        ) from None
    name = sniff(data)
    if name not in ACCEPTED:
        what = (
            "an empty file" if not data else f"a file of the format {name}" if name else "no image"
        )
        raise refuse(where, f"it is {what}; accepted are {', '.join(ACCEPTED)}")
    if max_pixels > _PILLOW_LIMIT:
        pillow.MAX_IMAGE_PIXELS = None  # the operator's own limit of pixels applies instead
    with _decoding(name, where):
        try:
            image: Image = pillow.open(io.BytesIO(data), formats=(name,))
        except pillow.DecompressionBombError:
            limit = min(max_pixels, 2 * (pillow.MAX_IMAGE_PIXELS or max_pixels))
            raise refuse(where, f"it has more than {limit} pixels, the limit") from None
        except pillow.UnidentifiedImageError:
            raise ValueError("Pillow cannot read it, or there is too little memory") from None
        width, height = image.size
        _check_size(width, height, max_pixels, where)
    if image.format == "PNG" and "transparency" in image.info:
        image.info["transparency"] = _color_key(data, image.info["transparency"])
    return image


def _color_key(data: bytes, key: Any) -> Any:
    """Return the transparent color of a PNG file in the range of the decoded pixels.

    Pillow scales gray of 2 and 4 bits and colors of 16 bits to 8 bits, but not this color.
    """
    depth, color_type = data[_PNG_DEPTH : _PNG_DEPTH + 2]
    if color_type == _PNG_GRAY and depth in (2, 4):
        return key * 255 // (2**depth - 1)
    if color_type == _PNG_RGB and depth == 16:
        return tuple(value >> 8 for value in key)
    return key


def _check_size(width: int, height: int, max_pixels: int, where: str) -> None:
    size = f"it has {width} x {height} pixels"
    if min(width, height) < 1:
        raise refuse(where, f"{size}; both must be at least 1")
    if width * height > max_pixels:
        raise refuse(
            where,
            f"{size}, more than {max_pixels}, the limit of VLLM_MAX_IMAGE_PIXELS. Scale it down",
        )
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise refuse(
            where,
            f"{size}: one edge is more than {MAX_ASPECT_RATIO} times as long as the other. Cut it",
        )


@contextmanager
def _decoding(format: str | None, where: str) -> Iterator[None]:
    """Convert exceptions of a decoder in this context to errors of the request.

    The format may be None.
    """
    try:
        yield
    except RequestError:
        raise
    except MemoryError:
        raise refuse(
            where, "there is not enough memory to decode it. Send an image with fewer pixels"
        ) from None
    except Exception as error:  # Pillow may raise anything for a damaged file
        reason = f"{str(error)[:_MAX_REASON_CHARS]}. Send a complete, undamaged file"
        raise refuse(where, f"this {format or 'image'} file cannot be decoded: {reason}") from error
