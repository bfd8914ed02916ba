"""Converts images, sounds and videos that programs pass as objects to `MediaSource`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm.errors import RequestError
from vllm.multimodal.images.image import Color, to_rgb
from vllm.multimodal.interface.family import EncoderInput, VideoFrames
from vllm.multimodal.interface.source import MediaSource

DEFAULT_FPS = 2.0
"""Frames per second of a video that is given as frames without their rate."""

_ACCEPTED = {
    "image": "an image of Pillow, the bytes of a file, or an array or tensor [height, width, 3] or "
    "[3, height, width] of bytes, or of floats from 0 to 1",
    "audio": "the bytes of a file, an array, tensor or list [samples] or [channels, samples] of "
    "finite floats from -1 to 1 or of int16, at least one, or such an array and its samples per "
    "second: (array, rate)",
    "video": "the bytes of a file, an array or tensor [frames, height, width, 3] or [frames, 3, "
    'height, width] of bytes, a list of images, or frames with their rate: (frames, {"fps": 2})',
}
"""Accepted objects, by modality."""
_INT16 = 2.0**15
_FPS = (1e-6, 1e6)
"""Smallest and largest number of frames per second."""
_MAX_CHANNELS = 32


@dataclass(frozen=True, slots=True)
class NamedItem:
    """An item that a program passes as an object in a conversation."""

    where: str
    """Name of the item in error messages."""
    item: Any


def as_list(modality: str, given: Any) -> list[Any]:
    """Return the items of one modality: the elements of a list, or anything else as one item.

    An array or tensor of four dimensions is several images of one size. A list of samples, or a
    pair of samples and their rate, is one sound. In a list of videos, a list of images is the
    frames of one video.
    """
    if modality == "image" and getattr(given, "ndim", None) == 4:
        return list(given)
    if not isinstance(given, (list, tuple)):
        return [given]
    is_one = False
    if given and modality == "audio":
        is_one = isinstance(given[0], (int, float)) or _is_pair(given, (int, float))
    elif given and modality == "video":
        is_one = _is_frame(given[0]) or _is_pair(given, Mapping)
    return [given] if is_one else list(given)


def as_source(
    modality: str,
    item: Any,
    *,
    where: str,
    uuid: str | None,
    overrides: Mapping[str, Any],
    sampling_rate: int,
    background: Color,
) -> MediaSource:
    """Convert an object, or the content of a file, that a program passes to a `MediaSource`.

    Args:
        modality: "image", "audio" or "video".
        item: item in any of the usual types; embeddings in the form of `GivenEmbeddings.divide`.
        where: name of the item in error messages.
        uuid: id of the item from the client.
        overrides: settings of the processor for the request.
        sampling_rate: sampling rate of samples whose rate is not given.
        background: color of transparent pixels of Pillow images.

    Raises:
        RequestError: it has an unsupported type or shape, or values out of range.
    """
    if isinstance(item, NamedItem):
        item, where = item.item, item.where
    if isinstance(item, MediaSource):
        return replace(item, overrides=overrides)
    if isinstance(item, EncoderInput):
        return MediaSource(modality=modality, where=where, uuid=uuid, encoded=item)
    fields: dict[str, Any] | None = None
    if isinstance(item, bytes):
        fields = {"data": item}
    elif modality == "image":
        pixels = _as_pixels(item, where, background)
        fields = None if pixels is None else {"pixels": pixels}
    elif modality == "audio":
        fields = _as_samples(item, sampling_rate)
    else:
        frames = _as_frames(item, background)
        fields = None if frames is None else {"frames": frames}
    if fields is None:
        raise RequestError(
            f"{where} must be {_ACCEPTED[modality]}; got {_description_of(item)}", param="prompt"
        )
    return MediaSource(modality=modality, where=where, uuid=uuid, overrides=overrides, **fields)


def _description_of(item: Any) -> str:
    """Return a description, for messages, of an object that is not supported."""
    if isinstance(item, tuple) and len(item) == 2:
        return f"({_description_of(item[0])}, {item[1]!r:.40})"
    found = _as_array(item)
    has_others = found is not None and found.dtype.kind == "f" and not np.isfinite(found).all()
    return f"{kind_of(item)}{' with NaN or infinite values' if has_others else ''}"


def kind_of(item: Any) -> str:
    """Return a description, for messages, of the type of an object."""
    shape, dtype = getattr(item, "shape", None), getattr(item, "dtype", None)
    if shape is None or dtype is None:
        return type(item).__name__
    return f"{type(item).__name__} {list(shape)} of {dtype}"


def _as_pixels(image: Any, where: str, background: Color) -> NDArray[np.uint8] | None:
    """Return the pixels [H, W, 3] of an image; None if its shape or type is not supported."""
    if _is_pillow(image):
        return np.asarray(to_rgb(image, background, where), np.uint8)
    found = _as_array(image)
    return None if found is None or found.ndim != 3 else _as_bytes(found)


def _as_samples(sound: Any, sampling_rate: int) -> dict[str, Any] | None:
    """Return samples [n] of one channel and their rate; None if shape or type is not supported."""
    if _is_pair(sound, (int, float)):
        sound, sampling_rate = sound
        if sampling_rate != int(sampling_rate) or sampling_rate < 1:
            return None
    samples = _as_array(sound)
    if samples is None or samples.ndim not in (1, 2) or not samples.size:
        return None
    if samples.dtype == np.int16:
        samples = samples / np.float32(_INT16)
    elif samples.dtype.kind != "f" or not np.isfinite(samples).all():
        return None
    if samples.ndim == 2:
        channels = int(np.argmin(samples.shape))
        if samples.shape[channels] > _MAX_CHANNELS:
            return None
        samples = samples.mean(axis=channels)
    samples = np.ascontiguousarray(samples, np.float32)
    return {"samples": samples, "sampling_rate": int(sampling_rate)}


def _as_frames(video: Any, background: Color) -> VideoFrames | None:
    """Return frames with their times; None if shape or type is not supported."""
    fps: Any = DEFAULT_FPS
    if _is_pair(video, Mapping):
        video, about = video
        fps = about.get("fps", DEFAULT_FPS)
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not _FPS[0] <= fps <= _FPS[1]:
        return None
    if isinstance(video, (list, tuple)):
        several = [
            _as_pixels(each, "a frame", background) if _is_frame(each) else None for each in video
        ]
        found = [frame for frame in several if frame is not None]
        if len(found) != len(several) or len({frame.shape for frame in found}) != 1:
            return None
        pixels: NDArray[np.uint8] | None = np.stack(found)
    else:
        array = _as_array(video)
        pixels = None if array is None or array.ndim != 4 else _as_bytes(array)
    if pixels is None:
        return None
    return VideoFrames(pixels, np.arange(len(pixels), dtype=np.float64) / fps)


def _is_frame(item: Any) -> bool:
    return _is_pillow(item) or getattr(item, "ndim", None) == 3


def _is_pillow(image: Any) -> bool:
    return hasattr(image, "getexif")


def _is_pair(item: Any, type_: Any) -> bool:
    """Return whether an item is a pair of an object and extra data of this type."""
    return (
        isinstance(item, tuple)
        and len(item) == 2
        and isinstance(item[1], type_)
        and not isinstance(item[0], (int, float))
    )


def _as_array(item: Any) -> NDArray[Any] | None:
    """Convert an array, a tensor or a list of numbers to an array; None for other types."""
    if isinstance(item, Sequence) and not isinstance(item, (str, bytes)):
        is_flat = all(isinstance(each, (int, float)) for each in item)
        return np.array(item, np.float32) if is_flat else None
    if hasattr(item, "detach"):
        try:
            item = item.detach().cpu()
            # numpy does not support bfloat16.
            item = (item.float() if item.is_floating_point() else item).numpy()
        except (RuntimeError, TypeError):  # a sparse tensor, or one without values
            return None
    return item if isinstance(item, np.ndarray) else None


def _as_bytes(image: NDArray[Any]) -> NDArray[np.uint8] | None:
    """Convert pixels to uint8 [..., H, W, 3]; None if shape or type is not supported."""
    if image.shape[-1] != 3:
        if image.shape[-3] != 3:
            return None
        image = np.moveaxis(image, -3, -1)
    if not image.size:
        return None
    if image.dtype.kind == "f":
        if not (np.isfinite(image).all() and image.min() >= 0 and image.max() <= 1):
            return None
        image = np.rint(image * 255)
    elif image.dtype.kind not in "iu" or image.min() < 0 or image.max() > 255:
        return None
    return np.ascontiguousarray(image, np.uint8)
