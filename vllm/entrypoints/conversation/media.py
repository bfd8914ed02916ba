"""Images of a conversation: reads the parts of content that have them, and collects them in order.

Fetches and decodes nothing. Knows no family of models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.errors import RequestError

IMAGE = "image"
"""Type of the parts of images in the normal form. They also have the index of the image."""

_FIELDS = {
    "image_url": ("image_url",),
    "input_image": ("image_url",),
    "image": ("image", "url", "path"),
    "image_pil": ("image_pil",),
}
"""Type of a part with an image -> the fields that may have it."""
_OTHER_MEDIA = ("input_audio", "audio_url", "audio", "video_url", "video", "input_video")
_EMBEDDINGS = ("image_embeds", "audio_embeds")
MEDIA_TYPES = frozenset((*_FIELDS, *_OTHER_MEDIA, *_EMBEDDINGS))
"""Types of parts that are not text."""
_DETAILS = ("auto", "low", "high", "original")
_SCHEMES = ("http://", "https://", "data:", "file://")
_MAX_SCHEME_CHARS = max(map(len, _SCHEMES))
_MAX_UUID_CHARS = 256
_MAX_WHERE_CHARS = 100

WHERE = "where"
"""Key of a part with an image for its position in the request of another API."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaPart:
    """An image of a conversation."""

    source: Any = field(repr=False)
    """A URL (str), or an object: of Pillow, numpy or torch, or the bytes of a file."""
    where: str
    """Its position in the request, such as `messages[2].content[1]`, for errors."""
    uuid: str | None = None
    """Identifies the image in caches, instead of its content."""
    detail: str | None = None
    """Resolution that the client asks for: low, high or original; None: auto."""


@dataclass(frozen=True, slots=True)
class ImageText:
    """The text that represents images in the prompts of a model."""

    placeholder: str
    """Text of the token of an image, such as `<image>`."""
    text: str
    """Text of an image for templates that take strings. Has the placeholder once."""

    def __post_init__(self) -> None:
        assert len(self.placeholder) > 1 and self.text.count(self.placeholder) == 1


@dataclass(frozen=True, kw_only=True)
class ImageRules:
    """Limits of a model for the images of a conversation, and their text."""

    text: ImageText
    max_images: int
    """That a conversation may have."""
    is_local: bool = False
    """The program itself has made the conversation: relative paths of files are resolved."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as text, and its images."""

    text: str
    images: list[MediaPart]
    """In the order of their placeholders in the text."""
    literals: list[int]
    """Indices of the placeholders, of all in the text, that a user has written."""


class MediaParts:
    """The images of one conversation.

    Args:
        max_images: that the conversation may have; None: the model reads text only.
        is_local: the conversation is of the program itself, whose relative paths can be found.
    """

    def __init__(self, max_images: int | None = None, *, is_local: bool = False) -> None:
        self.parts: list[MediaPart] = []
        """In the order of the messages. `index` of a part of the normal form is for this list."""
        self._max_images = max_images
        self._is_local = is_local

    def read(self, where: str, kind: str, part: Mapping[str, Any]) -> dict[str, Any]:
        """Return the normal form of a part that has a type of `MEDIA_TYPES`.

        Raises:
            RequestError: the model cannot read it, or it has no image.
        """
        if isinstance(named := part.get(WHERE), str):
            where = named[:_MAX_WHERE_CHARS]
        if self._max_images is None:
            raise _refusal(where, kind, "'text', as this model reads text only")
        if kind in _EMBEDDINGS:
            raise _refusal(where, kind, "'image_url', as embeddings of images are not accepted")
        if kind not in _FIELDS:
            raise _refusal(where, kind, "'text' or 'image_url': audio and video are not accepted")
        self.parts.append(_read_image(where, kind, part, self._is_local))
        return {"type": IMAGE, "index": len(self.parts) - 1}

    def check_count(self) -> None:
        """Refuse more images than a request may have.

        Raises:
            RequestError: there are more; names both numbers.
        """
        if self._max_images is not None and len(self.parts) > self._max_images:
            raise RequestError(
                f"the request has {len(self.parts)} images, and this server takes at most "
                f"{self._max_images} in one request (limit_mm_per_prompt): send fewer",
                param="messages",
            )


def image_part(url: str, where: str, detail: str | None = None) -> dict[str, Any]:
    """Return an image of another API as a part of the chat API.

    Args:
        url: of the image.
        where: its position in the request, for errors.
        detail: resolution that the client asks for, or None.
    """
    return {"type": IMAGE, "url": url, "detail": detail, WHERE: where}


def is_image(part: Mapping[str, Any]) -> bool:
    """Whether a part of the normal form is an image."""
    return part["type"] == IMAGE


def media_type(part: Mapping[str, Any]) -> str | None:
    """Return the type of a part with media that does not name its type, such as {"image_url": ...};
    None for any other part."""
    return next((kind for kind in part if kind in MEDIA_TYPES), None)


def _refusal(where: str, kind: str, accepted: str) -> RequestError:
    return RequestError(
        f"{where} must have the type {accepted}; got {kind!r}",
        param="messages",
    )


def _read_image(where: str, kind: str, part: Mapping[str, Any], is_local: bool) -> MediaPart:
    if kind == "input_image" and part.get("file_id") is not None:
        raise RequestError(
            f"{where}.file_id must be absent, as this server keeps no files: send image_url, a URL "
            f"or a data: URL",
            param="messages",
        )
    names = _FIELDS[kind]
    key = next((name for name in names if part.get(name) is not None), names[0])
    given: Any = part.get(key)
    detail = part.get("detail")
    if isinstance(given, MediaPart):  # it has been read, and maybe fetched
        return given
    name = f"{where}.{key}"
    if key == "image_url" and isinstance(given, Mapping):
        given, detail, name = given.get("url"), given.get("detail", detail), f"{name}.url"
    if detail is not None and detail not in _DETAILS:
        raise RequestError(
            f"{where}: detail must be one of {', '.join(_DETAILS)}, got {detail!r:.80}",
            param="messages",
        )
    uuid = part.get("uuid")
    if uuid is not None and not (isinstance(uuid, str) and 0 < len(uuid) <= _MAX_UUID_CHARS):
        raise RequestError(
            f"{where}.uuid must be a string of 1 to {_MAX_UUID_CHARS} characters, got {uuid!r:.80}",
            param="messages",
        )
    source = _read_source(name, key, given, is_local)
    return MediaPart(source, where, uuid, None if detail == "auto" else detail)


def _read_source(name: str, key: str, given: Any, is_local: bool) -> Any:
    """Return a URL, or an object that a program has given."""
    if isinstance(given, Path):
        given = str(given)
    if isinstance(given, str) and given:
        if given[:_MAX_SCHEME_CHARS].lower().startswith(_SCHEMES):
            return given
        if key in ("path", "image") and (is_local or given.startswith("/")):
            return Path(given).absolute().as_uri()
        raise RequestError(
            f"{name} must begin with http://, https://, data: or file://, got {given!r:.80}",
            param="messages",
        )
    is_object = key in ("image", "image_pil") and not isinstance(
        given, (str, bytes, int, float, Mapping, type(None))
    )
    if is_object and not (isinstance(given, Sequence) and not hasattr(given, "shape")):
        return given
    raise RequestError(
        f"{name} must be {_EXPECTED[key]}, got {type(given).__name__}", param="messages"
    )


_URL = "the URL of an image (http://, https://, data: or file://)"
_EXPECTED = {
    "image_url": _URL,
    "url": _URL,
    "path": "the path of a file",
    "image": "an image of Pillow, an array, or a URL",
    "image_pil": "an image of Pillow",
}
"""Field of a part -> what it must be."""
