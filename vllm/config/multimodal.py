"""Images in requests: how many, from where, and how they are read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from vllm.errors import ConfigError

MODALITIES = ("image", "audio", "video")
_USUAL_IMAGES = 16
_LIMIT_KEYS = ("count", "width", "height", "num_frames", "length")
_WHITE = (255, 255, 255)


@dataclass(frozen=True, kw_only=True)
class ItemLimit:
    """Maximum number of items of one kind in a request, and their expected size."""

    count: int
    """Maximum number in one request."""
    width: int | None = None
    """Largest expected width in pixels; None: any."""
    height: int | None = None
    """Largest expected height in pixels; None: any."""


@dataclass(frozen=True, kw_only=True)
class MultiModalConfig:
    """Images in requests, for models that read them."""

    limit_mm_per_prompt: Mapping[str, Any] = field(default_factory=dict)
    """Maximum number of items of each kind in one request: image=4, or as JSON {"image": 4} or
    {"image": {"count": 4, "width": 1024, "height": 768}}. The last two are the largest image to
    expect: a card prepares for it and refuses images that need more. A number without a name
    limits the images. Not set: 16 images."""

    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the image processor that replace the settings of the checkpoint (JSON), such as
    {"max_pixels": 1003520}."""

    media_io_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """How files are decoded (JSON). {"image": {"rgba_background_color": [0, 0, 0]}} is the
    background color of transparent images. Not set: white."""

    allowed_local_media_path: str = ""
    """Folder of this machine with files that requests may name by file: URLs. Not set: none."""

    allowed_media_domains: tuple[str, ...] = ()
    """The only hosts that requests may name in URLs. Their addresses may be private. Not set: all
    hosts of the public internet."""

    mm_processor_cache_gb: float = 4.0
    """Memory in GiB for processed images, so that an image that comes again is not processed again.
    0: none are kept."""

    disable_mm_preprocessor_cache: bool = False
    """Keep no processed images, whatever mm_processor_cache_gb is."""

    skip_mm_profiling: bool = False
    """Do not run the largest image at the start of a card, which measures how much memory images
    take. Then gpu_memory_utilization has to leave room for them. On the CPU no image is run."""

    disable_chunked_mm_input: bool = False
    """Never divide the tokens of an image between two steps."""

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
        """Names of the settings that do not have their default."""
        usual = MultiModalConfig()
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(usual, f.name)]

    @property
    def image_limit(self) -> ItemLimit:
        """The limits of images."""
        given = self.limit_mm_per_prompt.get("image", _USUAL_IMAGES)
        if not isinstance(given, Mapping):
            return ItemLimit(count=given)
        return ItemLimit(
            count=given.get("count", _USUAL_IMAGES),
            width=given.get("width"),
            height=given.get("height"),
        )

    @property
    def background(self) -> tuple[int, int, int]:
        """Background color (r, g, b) of transparent images."""
        image = self.media_io_kwargs.get("image", {})
        red, green, blue = image.get("rgba_background_color", _WHITE)
        return red, green, blue

    @property
    def processor_cache_bytes(self) -> int:
        """Memory for processed images."""
        if self.disable_mm_preprocessor_cache:
            return 0
        return int(self.mm_processor_cache_gb * 2**30)


def _check_limit(kind: str, value: object) -> None:
    name = f"limit_mm_per_prompt: {kind}"
    if kind not in MODALITIES:
        raise ConfigError(
            f"limit_mm_per_prompt has no kind {kind!r}; accepted: {', '.join(MODALITIES)}"
        )
    counts = value if isinstance(value, Mapping) else {"count": value}
    for key, number in counts.items():
        if key not in _LIMIT_KEYS:
            raise ConfigError(f"{name} has no key {key!r}; accepted: {', '.join(_LIMIT_KEYS)}")
        smallest = 0 if key == "count" else 1
        if type(number) is not int or number < smallest:
            raise ConfigError(
                f"{name} must be an integer of at least {smallest}, or an object such as "
                f'{{"count": 4, "width": 1024, "height": 768}}; got {value!r}'
            )


def _check_media_io(given: Mapping[str, Any]) -> None:
    for kind, settings in given.items():
        if kind not in MODALITIES:
            raise ConfigError(
                f"media_io_kwargs has no kind {kind!r}; accepted: {', '.join(MODALITIES)}"
            )
        if not isinstance(settings, Mapping):
            raise ConfigError(f"media_io_kwargs: {kind} must be an object, got {settings!r}")
    for key, color in given.get("image", {}).items():
        if key != "rgba_background_color":
            raise ConfigError(
                f"media_io_kwargs: image has no key {key!r}; accepted: rgba_background_color"
            )
        is_list = isinstance(color, (list, tuple)) and len(color) == 3
        if not is_list or not all(type(x) is int and 0 <= x <= 255 for x in color):
            raise ConfigError(
                "media_io_kwargs: rgba_background_color must be three integers from 0 to 255 "
                f"(red, green, blue), got {color!r}"
            )
