"""Read the parts of a conversation that contain images, audio or videos, and collect them in order.

Fetches and decodes nothing. Independent of model families.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vllm.errors import RequestError
from vllm.inputs import MODALITIES, plural
from vllm.utils.text.json_words import show_value


class _Kind(NamedTuple):
    """A type of content part with a media item."""

    modality: str
    fields: tuple[str, ...]
    """Names of the fields that may have it."""


_KINDS = {
    "image_url": _Kind("image", ("image_url",)),
    "input_image": _Kind("image", ("image_url",)),
    "image": _Kind("image", ("image", "url", "path")),
    "image_pil": _Kind("image", ("image_pil",)),
    "audio_url": _Kind("audio", ("audio_url",)),
    "input_audio": _Kind("audio", ("input_audio",)),
    "audio": _Kind("audio", ("audio", "url", "path")),
    "video_url": _Kind("video", ("video_url",)),
    "input_video": _Kind("video", ("video_url",)),
    "video": _Kind("video", ("video", "url", "path")),
    "image_embeds": _Kind("image", ("image_embeds",)),
}
_USUAL_TYPES = {"image": "image_url", "audio": "input_audio", "video": "video_url"}
"""Type of the parts that messages recommend, by modality."""
_REFUSED = ("audio_embeds",)
MEDIA_TYPES = frozenset((*_KINDS, *_REFUSED))
"""Types of parts that are not text."""
_DETAILS = ("auto", "low", "high", "original")
_SCHEMES = ("http://", "https://", "data:", "file://")
_MAX_SCHEME_CHARS = max(map(len, _SCHEMES))
_ELSEWHERE = {
    "mm_processor_kwargs of the request, such as {'max_pixels': 1003520}": (
        *("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width"),
    ),
    "--media-io-kwargs, or for frames of a program in (frames, {'fps': 2})": (
        *("fps", "nframes", "num_frames"),
    ),
}
"""Field or flag for settings -> names of the settings, which some clients send in parts."""
_MAX_UUID_CHARS = 256
_BASE64 = re.compile(r"[A-Za-z0-9+/=_\s-]+")
_MIN_BASE64_CHARS = 64
"""Shortest text that is taken for base64. The path of a file has other characters, such as dots."""
_LOOKED_AT_CHARS = 4096
_MAX_SHOWN_CHARS = 256
"""Longest text without a scheme that is shown: a longer one may be the content of a file."""
_MEDIA_TYPES = {"image": "image/png", "audio": "audio/wav", "video": "video/mp4"}
_MAX_WHERE_CHARS = 100
_MAX_FORMAT_CHARS = 32

WHERE = "where"
"""Key of a part with media for its position in the request of another API."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaPart:
    """An image, audio clip or video of a conversation."""

    modality: str
    """"image", "audio" or "video"."""
    source: Any = field(repr=False)
    """A URL (str), the bytes of a file, embeddings (dict), or an object of a program."""
    where: str
    """Position of the part in the request, such as `messages[2].content[1]`, for errors."""
    uuid: str | None = None
    """Identifies the item in caches, instead of its content."""
    detail: str | None = None
    """Resolution that the client asks for: low, high or original; None: auto."""


@dataclass(frozen=True, slots=True)
class MediaText:
    """The text that represents the items of one modality in the prompts of a model."""

    placeholder: str
    """Text of the token of an item, such as `<image>`."""
    text: str
    """Text of an item for templates that take strings. Has the placeholder once."""

    def __post_init__(self) -> None:
        assert len(self.placeholder) > 1 and self.text.count(self.placeholder) == 1


@dataclass(frozen=True, kw_only=True)
class MediaRules:
    """Limits of a model for the media of a conversation, and the texts that represent the items."""

    texts: Mapping[str, MediaText]
    """Modality that the model reads -> its text."""
    limits: Mapping[str, int]
    """Items that a conversation may have, by modality."""
    is_local: bool = False
    """Whether the program itself has made the conversation: then relative paths of files are
    resolved."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as text, and its media."""

    text: str
    media: list[MediaPart]
    """Items of one modality are in the order of their placeholders in the text."""
    literals: list[int]
    """Indices of the placeholders, of all in the text, that a user has written."""


class MediaParts:
    """Collects the media of one conversation.

    Args:
        limits: maximum number of items, by modality that the model reads.
        is_local: the conversation comes from this program, so relative paths can be resolved.
    """

    def __init__(self, limits: Mapping[str, int] | None = None, *, is_local: bool = False) -> None:
        self.parts: list[MediaPart] = []
        """Media parts in the order of the messages. The `index` of a part in normal form refers to
        this list."""
        self._limits = limits or {}
        self._is_local = is_local

    def reads(self, kind: str) -> bool:
        """Return whether the model reads parts of a type of `MEDIA_TYPES`."""
        return kind in _REFUSED or bool(self._limits.get(_KINDS[kind].modality))

    def read(self, where: str, kind: str, part: Mapping[str, Any]) -> dict[str, Any]:
        """Return the normal form of a content part whose type is in `MEDIA_TYPES`.

        Raises:
            RequestError: the model cannot read it, or the item is missing.
        """
        if isinstance(named := part.get(WHERE), str):
            where = named[:_MAX_WHERE_CHARS]
        if kind in _REFUSED or _KINDS[kind].modality not in self._limits:
            raise RequestError(
                f"{where} must have the type {self._accepted(kind)}; got {show_value(kind)}",
                param="messages",
            )
        modality = _KINDS[kind].modality
        self.parts.append(_read_part(where, kind, part, self._is_local))
        return {"type": modality, "index": len(self.parts) - 1}

    def _accepted(self, kind: str) -> str:
        """Describe what the model reads, and why a type is not accepted."""
        if not self._limits:
            return '"text", as this model reads text only'
        types = " or ".join(show_value(_USUAL_TYPES[modality]) for modality in self._limits)
        if kind in _REFUSED:
            return f"{types}, as embeddings of sounds are not accepted"
        reads = " and ".join(map(plural, self._limits))
        return f'"text" or {types}, as this model reads text and {reads} only'

    def surplus(self) -> dict[str, int]:
        """Return how many items are above the limit, by modality."""
        counts = Counter(part.modality for part in self.parts)
        return {
            modality: counts[modality] - limit
            for modality, limit in self._limits.items()
            if counts[modality] > limit
        }

    def leave_out(self, dropped: Collection[int]) -> dict[int, int]:
        """Remove the parts with these indices; return the old index of each other part -> its new
        one.
        """
        kept = [index for index in range(len(self.parts)) if index not in dropped]
        self.parts[:] = [self.parts[index] for index in kept]
        return {old: new for new, old in enumerate(kept)}

    def check_count(self) -> None:
        """Refuse more items than a request may have.

        Raises:
            RequestError: there are more items; names both numbers, and the first item above the
                limit.
        """
        for modality in self.surplus():
            limit = self._limits[modality]
            found = [part for part in self.parts if part.modality == modality]
            where = found[limit].where
            if not limit:
                raise RequestError(
                    f"{where}: this server does not accept {plural(modality)} "
                    "(limit_mm_per_prompt): leave them out",
                    param="messages",
                )
            raise RequestError(
                f"{where}: the request has {len(found)} {plural(modality)}, and this server takes "
                f"at most {limit} in one request (limit_mm_per_prompt): send fewer",
                param="messages",
            )


def image_part(url: str, where: str, detail: str | None = None) -> dict[str, Any]:
    """Return an image of another API as a part of the chat API.

    Args:
        url: URL of the image.
        where: position of the image in the request, for errors.
        detail: resolution that the client asks for, or None.
    """
    return {"type": "image", "url": url, "detail": detail, WHERE: where}


def is_media(part: Mapping[str, Any]) -> bool:
    """Return whether a part in the normal form is an image, an audio clip or a video."""
    return part["type"] in MODALITIES


def media_type(part: Mapping[str, Any]) -> str | None:
    """Return the type of a media part that does not name its type, such as {"image_url": ...}; None
    for any other part.
    """
    return next((kind for kind in part if kind in MEDIA_TYPES), None)


def modality_of(kind: str) -> str:
    """Return the modality of a type of `MEDIA_TYPES`."""
    return _KINDS[kind].modality if kind in _KINDS else "audio"


def _read_part(where: str, kind: str, part: Mapping[str, Any], is_local: bool) -> MediaPart:
    if kind == "input_image" and part.get("file_id") is not None:
        raise RequestError(
            f"{where}.file_id is not supported, because this server stores no files: send "
            "image_url, a URL or a data: URL",
            param="messages",
        )
    modality, names = _KINDS[kind]
    key = next((name for name in names if part.get(name) is not None), names[0])
    given: Any = part.get(key)
    detail = part.get("detail")
    if isinstance(given, MediaPart):  # it was already read, and perhaps fetched
        return given
    name = f"{where}.{key}"
    _check_fields(where, part)
    if key.endswith("_url") and isinstance(given, Mapping):
        _check_fields(name, given)
        given, detail, name = given.get("url"), given.get("detail", detail), f"{name}.url"
    if detail is not None and detail not in _DETAILS:
        raise RequestError(
            f"{where}: detail must be one of {', '.join(_DETAILS)}, got {show_value(detail)}",
            param="messages",
        )
    uuid = part.get("uuid")
    if uuid is not None and not (isinstance(uuid, str) and 0 < len(uuid) <= _MAX_UUID_CHARS):
        raise RequestError(
            f"{where}.uuid must be a string of 1 to {_MAX_UUID_CHARS} characters, "
            f"got {show_value(uuid)}",
            param="messages",
        )
    if given is None and uuid is not None:
        raise RequestError(
            f"{name} must be sent together with the uuid: a uuid without the item is not enough",
            param="messages",
        )
    if key == "input_audio":
        source: Any = _read_base64(name, given)
    elif key == "image_embeds":
        source = _read_embeddings(name, given)
    else:
        source = _read_source(name, key, modality, given, is_local)
    return MediaPart(modality, source, where, uuid, None if detail == "auto" else detail)


def _check_fields(name: str, part: Mapping[str, Any]) -> None:
    """Refuse settings that would have no effect in a part.

    Raises:
        RequestError: there is one; says where it belongs.
    """
    for owner, settings in _ELSEWHERE.items():
        for setting in settings:
            if part.get(setting) is not None:
                raise RequestError(
                    f"{name}.{setting} must be left out: it has an effect only in {owner}",
                    param="messages",
                )


def _read_base64(name: str, given: Any) -> str:
    """Return a data: URL for audio that is given as base64."""
    about = given if isinstance(given, Mapping) else {}
    data, form = about.get("data"), about.get("format")
    if not isinstance(data, str) or not data:
        raise RequestError(
            f'{name} must be an object such as {{"data": "...", "format": "wav"}}, whose data is '
            f"the base64 text of a file",
            param="messages",
        )
    is_known = form is None or (isinstance(form, str) and form.isalnum())
    if not is_known or len(form or "") > _MAX_FORMAT_CHARS:
        raise RequestError(
            f"{name}.format must be the name of a format, such as wav or mp3, "
            f"got {show_value(form)}",
            param="messages",
        )
    return data if data[:5].lower() == "data:" else f"data:audio/{form or 'wav'};base64,{data}"


def _read_embeddings(name: str, given: Any) -> Mapping[str, Any]:
    """Return image embeddings in the form that `multi_modal_data` accepts."""
    if isinstance(given, str) or hasattr(given, "shape"):
        return {"image_embeds": given}
    if not isinstance(given, Mapping):
        raise RequestError(
            f"{name} must be the base64 text of a tensor, or an object such as "
            f'{{"image_embeds": "...", "image_grid_thw": "..."}}, got {show_value(given)}',
            param="messages",
        )
    return given


def _read_source(name: str, key: str, modality: str, given: Any, is_local: bool) -> Any:
    """Return the source of an item: a URL, or an object that a program has given."""
    if isinstance(given, Path):
        given = str(given)
    if isinstance(given, str) and (given := given.strip()):
        if given[:_MAX_SCHEME_CHARS].lower().startswith(_SCHEMES):
            return given
        if len(given) >= _MIN_BASE64_CHARS and _BASE64.fullmatch(given, 0, _LOOKED_AT_CHARS):
            raise RequestError(
                f"{name} must begin with data:, a media type and ;base64, such as "
                f"'data:{_MEDIA_TYPES[modality]};base64,...', got base64 without such a beginning "
                f"({len(given)} characters)",
                param="messages",
            )
        if key in ("path", modality) and (is_local or given.startswith("/")):
            return Path(given).absolute().as_uri()
        is_short = len(given) <= _MAX_SHOWN_CHARS
        shown = f"{given!r:.80}" if is_short else f"a text of {len(given)} characters"
        raise RequestError(
            f"{name} must begin with http://, https://, data: or file://, got {shown}",
            param="messages",
        )
    if key in (modality, "image_pil") and _is_object(modality, given, is_local):
        return given
    is_url = key == modality and not is_local
    expected = _EXPECTED[f"{modality}_url" if is_url else key]
    raise RequestError(f"{name} must be {expected}, got {_shown(given)}", param="messages")


def _shown(given: Any) -> str:
    """Describe a value that is no item."""
    if given is None:
        return "null"
    return repr(given) if given == "" else type(given).__name__


def _is_object(modality: str, given: Any, is_local: bool) -> bool:
    """Return whether the value is an object of a program that JSON cannot contain, or non-empty
    bytes or a list of one.
    """
    if modality != "image" and is_local and isinstance(given, (bytes, list, tuple)):
        return bool(given)
    if isinstance(given, (str, bytes, int, float, Mapping, type(None))):
        return False
    return hasattr(given, "shape") or not isinstance(given, Sequence)


_URL = "the URL of {} (http://, https://, data: or file://)"
_EXPECTED = {
    "image_url": _URL.format("an image"),
    "audio_url": _URL.format("a sound"),
    "video_url": _URL.format("a video"),
    "url": _URL.format("a file"),
    "path": "the path of a file",
    "image": "an image of Pillow, an array, or a URL",
    "image_pil": "an image of Pillow",
    "audio": "samples and their rate (array, rate), the bytes of a file, or a URL",
    "video": "an array [frames, height, width, 3], a list of images, the bytes of a file, or a URL",
}
"""Field of a part -> description of its type."""
