"""Define settings for images, audio and videos in requests: how many, from where, and how they are
read.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from vllm.errors import ConfigError
from vllm.inputs import MODALITIES

_USUAL_COUNTS = {"image": 16, "audio": 16, "video": 4}
"""Items of a request where no limit is given."""
_LIMIT_KEYS = {
    "image": ("count", "width", "height"),
    "audio": ("count",),
    "video": ("count", "num_frames"),
}
"""Keys of the limits of each kind. Each has a reader."""
_WHITE = (255, 255, 255)
_MAX_FRAMES = 768
_MAX_RATE = 1000
"""Frames per second."""


@dataclass(frozen=True, kw_only=True)
class ItemLimit:
    """Maximum number of items of one kind in a request, and their expected size."""

    count: int
    """Maximum number of items in one request."""
    width: int | None = None
    """Largest expected width in pixels; None: any."""
    height: int | None = None
    """Largest expected height in pixels; None: any."""
    num_frames: int | None = None
    """Maximum number of frames of a video that the model gets; None: the video settings decide."""


@dataclass(frozen=True, kw_only=True)
class VideoSettings:
    """Settings for choosing the frames of a video."""

    num_frames: int = 32
    """Maximum number of frames, spread evenly over the video. -1: no other limit than fps."""
    fps: float = -1.0
    """Maximum number of frames for each second of the video. -1: no other limit than num_frames."""


@dataclass(frozen=True, kw_only=True)
class MultiModalConfig:
    """Settings for images, audio and videos in requests, for models that read them."""

    limit_mm_per_prompt: Mapping[str, Any] = field(default_factory=dict)
    """Maximum number of images, sounds and videos in one request, such as image=4,video=1, or as
    JSON {"image": 4} or {"image": {"count": 4, "width": 1024, "height": 768}, "video": {"count": 1,
    "num_frames": 16}}. A number without a name limits the images. width and height are the size
    of the largest expected image: images with more embeddings than that are refused, and a card is
    prepared only for images up to that size. num_frames is the maximum number of frames of a video.
    Default: 16 images, 16 sounds, 4 videos; no videos with image=0."""

    enable_mm_embeds: bool = False
    """Accept embeddings of images instead of images (image_embeds)."""

    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the image processor or feature extractor as JSON, such as {"max_pixels":
    1003520}. They replace the settings in the checkpoint."""

    media_io_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Settings for decoding files, as JSON. {"image": {"rgba_background_color": [0, 0, 0]}}:
    background color of transparent images (default: white). {"video": {"num_frames": 32, "fps":
    2}}: use at most 32 frames of a video (default: 32), and at most 2 for each second (default: no
    limit); -1 means no limit."""

    allowed_local_media_path: str = ""
    """Folder on this machine with files that requests may name by file: URLs. Default: requests
    cannot name files."""

    allowed_media_domains: tuple[str, ...] = ()
    """Host names that requests may use in URLs of images, sounds and videos; all others are
    refused. A named host may have a private address. Default: all hosts on the public internet."""

    mm_processor_cache_gb: float = 4.0
    """Memory in GiB for a cache of processed images, sounds and videos, so that one that is sent
    again is not processed again. 0: no cache."""

    disable_mm_preprocessor_cache: bool = False
    """Turn the cache of processed images, sounds and videos off, even if mm_processor_cache_gb is
    not 0."""

    skip_mm_profiling: bool = False
    """Do not measure at the start how much memory the encoder needs for the largest image.
    gpu_memory_utilization must then leave enough memory free for it."""

    disable_chunked_mm_input: bool = False
    """Never divide the tokens of an image, sound or video between two steps."""

    def __post_init__(self) -> None:
        for kind, value in self.limit_mm_per_prompt.items():
            _check_limit(kind, value)
        _check_media_io(self.media_io_kwargs)
        if not (math.isfinite(self.mm_processor_cache_gb) and self.mm_processor_cache_gb >= 0):
            raise ConfigError(
                f"mm_processor_cache_gb must be at least 0, got {self.mm_processor_cache_gb!r}"
            )

    @property
    def given(self) -> list[str]:
        """Names of the settings that differ from their defaults."""
        usual = MultiModalConfig()
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(usual, f.name)]

    def limit(self, modality: str) -> ItemLimit:
        """Return the limits for images, audio or videos."""
        given = self.limit_mm_per_prompt.get(modality, {})
        if not isinstance(given, Mapping):
            return ItemLimit(count=given)
        usual = _USUAL_COUNTS[modality]
        if modality == "video" and self.limit("image").count == 0:
            usual = 0
        return ItemLimit(**{"count": usual, **given})

    @property
    def largest_image(self) -> tuple[int, int] | None:
        """Width and height of the largest expected image; None: not limited."""
        limit = self.limit("image")
        if limit.width is None or limit.height is None:
            return None
        return limit.width, limit.height

    @property
    def counts(self) -> dict[str, int]:
        """Maximum number of items in one request, by modality."""
        return {modality: self.limit(modality).count for modality in MODALITIES}

    @property
    def max_frames(self) -> int:
        """Maximum number of frames of a video that are passed to the model."""
        return self.limit("video").num_frames or _MAX_FRAMES

    @property
    def video(self) -> VideoSettings:
        """Settings for choosing the frames of videos, with -1 frames (all) replaced by the
        maximum.
        """
        settings = VideoSettings(**self.media_io_kwargs.get("video", {}))
        wanted = _MAX_FRAMES if settings.num_frames == -1 else settings.num_frames
        return replace(settings, num_frames=min(wanted, self.max_frames))

    @property
    def background(self) -> tuple[int, int, int]:
        """Background color (r, g, b) of transparent images."""
        image = self.media_io_kwargs.get("image", {})
        red, green, blue = image.get("rgba_background_color", _WHITE)
        return red, green, blue

    @property
    def processor_cache_bytes(self) -> int:
        """Bytes of memory for processed media."""
        if self.disable_mm_preprocessor_cache:
            return 0
        return int(self.mm_processor_cache_gb * 2**30)


def _check_limit(kind: str, value: object) -> None:
    name = f"limit_mm_per_prompt: {kind}"
    if kind not in MODALITIES:
        raise ConfigError(
            f"limit_mm_per_prompt has the unknown kind of media {kind!r}; accepted: "
            f"{', '.join(MODALITIES)}"
        )
    counts = value if isinstance(value, Mapping) else {"count": value}
    for key, number in counts.items():
        if key not in _LIMIT_KEYS[kind]:
            accepted = ", ".join(_LIMIT_KEYS[kind])
            raise ConfigError(f"{name} has the unknown key {key!r}; accepted: {accepted}")
        smallest = 0 if key == "count" else 1
        if type(number) is int and number >= smallest:
            continue
        if counts is value:
            raise ConfigError(
                f"{name}: {key} must be an integer of at least {smallest}; got {number!r}"
            )
        example = ", ".join(f'"{each}": 4' for each in _LIMIT_KEYS[kind])
        raise ConfigError(
            f"{name} must be an integer of at least 0, or an object such as {{{example}}}; got "
            f"{value!r}"
        )
    if ("width" in counts) != ("height" in counts):
        raise ConfigError(f"{name} must have both width and height, or neither; got {value!r}")


def _check_media_io(given: Mapping[str, Any]) -> None:
    for kind, settings in given.items():
        if kind not in MODALITIES:
            raise ConfigError(
                f"media_io_kwargs has the unknown kind of media {kind!r}; accepted: "
                f"{', '.join(MODALITIES)}"
            )
        if not isinstance(settings, Mapping):
            raise ConfigError(f"media_io_kwargs: {kind} must be an object, got {settings!r}")
        for key, value in settings.items():
            if key not in _IO_KEYS[kind]:
                accepted = ", ".join(_IO_KEYS[kind]) or "none"
                raise ConfigError(
                    f"media_io_kwargs: {kind} has the unknown key {key!r}; accepted: {accepted}"
                )
            is_accepted, accepted = _IO_KEYS[kind][key]
            if not is_accepted(value):
                raise ConfigError(f"media_io_kwargs: {key} must be {accepted}, got {value!r}")


def _is_color(value: Any) -> bool:
    is_list = isinstance(value, (list, tuple)) and len(value) == 3
    return is_list and all(type(x) is int and 0 <= x <= 255 for x in value)


def _is_frames(value: Any) -> bool:
    return type(value) is int and (value == -1 or 1 <= value <= _MAX_FRAMES)


def _is_rate(value: Any) -> bool:
    return type(value) in (int, float) and (value == -1 or 0 < value <= _MAX_RATE)


_IO_KEYS: Mapping[str, Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "image": {
        "rgba_background_color": (_is_color, "three integers from 0 to 255 (red, green, blue)")
    },
    "audio": {},
    "video": {
        "num_frames": (_is_frames, f"an integer from 1 to {_MAX_FRAMES}, or -1 for no limit"),
        "fps": (_is_rate, f"a number above 0 and up to {_MAX_RATE}, or -1 for no limit"),
    },
}
"""Settings of each kind: what is accepted, and its description."""
