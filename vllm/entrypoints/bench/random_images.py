"""Create random images for the requests of a benchmark. They need no network, and no two are the
same.
"""

import argparse
import ast
import io
import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm.errors import ConfigError
from vllm.utils.arguments import add_number, add_text

_SIZES = "--random-mm-bucket-config"
_LIMIT = "--random-mm-limit-mm-per-prompt"
_DEFAULT_SIZES = {(256, 256): 0.5, (720, 1280): 0.5}
_DEFAULT_LIMIT = 255
_COARSE = 8
"""Pixels of the smallest details, so that a file has about the size of a photo."""
_QUALITY = 85


@dataclass(frozen=True, kw_only=True)
class RandomImageArgs:
    """Number and sizes of the images of each request.

    Raises:
        ConfigError: a value is out of range.
    """

    num_items: int = 1
    """Average number of pictures of a request."""
    range_ratio: float = 0.0
    """Counts are drawn evenly from `(1 - range_ratio) * num_items` to `(1 + range_ratio) *
    num_items`."""
    max_items: int = _DEFAULT_LIMIT
    """Maximum number of images of a request."""
    sizes: Mapping[tuple[int, int], float] = field(default_factory=lambda: _DEFAULT_SIZES)
    """(height, width) in pixels -> weight."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("--random-mm-base-items-per-request", self.num_items, 0),
            (f"image of {_LIMIT}", self.max_items, 1),
        ):
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        if not 0 <= self.range_ratio <= 1:
            raise ConfigError(
                f"--random-mm-num-mm-items-range-ratio must be from 0 to 1, got {self.range_ratio}"
            )


class RandomImages:
    """Creates random images.

    Args:
        args: number and sizes of the images.
        seed: seed of the random images.

    Raises:
        ConfigError: Pillow is not installed.
    """

    def __init__(self, args: RandomImageArgs, seed: int) -> None:
        try:
            from PIL import Image
        except ImportError:
            raise ConfigError(
                "--dataset-name random-mm needs Pillow: pip install 'vllm[image]'"
            ) from None
        self._args, self._pillow = args, Image
        self._rng, self._pixels = random.Random(seed), np.random.default_rng(seed)

    def draw(self) -> tuple[bytes, ...]:
        """Return the image files (JPEG) of one request."""
        args = self._args
        low = math.floor(args.num_items * (1 - args.range_ratio))
        high = math.ceil(args.num_items * (1 + args.range_ratio))
        count = min(self._rng.randint(low, high), args.max_items)
        sizes = self._rng.choices(list(args.sizes), list(args.sizes.values()), k=count)
        return tuple(self._file(height, width) for height, width in sizes)

    def _file(self, height: int, width: int) -> bytes:
        shape = (math.ceil(height / _COARSE), math.ceil(width / _COARSE), 3)
        coarse = self._pixels.integers(0, 256, shape, np.uint8)
        file = io.BytesIO()
        self._pillow.fromarray(coarse).resize((width, height)).save(file, "JPEG", quality=_QUALITY)
        return file.getvalue()


def add_image_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `RandomImageArgs`."""
    group = parser.add_argument_group("random pictures (--dataset-name random-mm)")
    add_number(group, "--random-mm-base-items-per-request", "images of each request", 1)
    add_number(
        group,
        "--random-mm-num-mm-items-range-ratio",
        "counts of images differ by up to this fraction from the given count",
        0.0,
    )
    add_text(
        group,
        _LIMIT,
        f"maximum number of images of a request, such as '{{\"image\": 3}}' "
        f"(default: {_DEFAULT_LIMIT})",
        "{}",
        metavar="JSON",
    )
    add_text(
        group,
        _SIZES,
        "sizes (height, width, 1) of the pictures, with the fraction that has each size "
        "(default: '{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}')",
        metavar="DICT",
    )


def read_image_flags(args: argparse.Namespace) -> RandomImageArgs:
    """Return the arguments from the flags of `add_image_flags`.

    Raises:
        ConfigError: a flag is malformed or out of range.
    """
    text = args.random_mm_bucket_config
    return RandomImageArgs(
        num_items=args.random_mm_base_items_per_request,
        range_ratio=args.random_mm_num_mm_items_range_ratio,
        max_items=_read_limit(args.random_mm_limit_mm_per_prompt),
        sizes=_DEFAULT_SIZES if text is None else _read_sizes(text),
    )


def _read_limit(text: str) -> int:
    try:
        limits: Any = json.loads(text)
    except json.JSONDecodeError:
        limits = None
    if not isinstance(limits, dict) or not all(type(most) is int for most in limits.values()):
        raise ConfigError(f'{_LIMIT} must be a JSON object such as {{"image": 3}}, got {text!r}')
    for kind, most in limits.items():
        if kind != "image" and most:
            raise ConfigError(
                f"{_LIMIT}: this benchmark only makes images, so {kind!r} must be 0, got {most}"
            )
    return int(limits.get("image", _DEFAULT_LIMIT))


def _read_sizes(text: str) -> dict[tuple[int, int], float]:
    problem = ConfigError(
        f"{_SIZES} must be a dictionary such as {{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}}, with "
        f"heights, widths and weights above 0, got {text!r:.200}"
    )
    try:
        given: Any = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise problem from None
    if not isinstance(given, dict):
        raise problem
    sizes: dict[tuple[int, int], float] = {}
    for size, weight in given.items():
        is_size = isinstance(size, tuple) and len(size) == 3 and all(type(n) is int for n in size)
        if (
            not is_size
            or min(size) < 1
            or type(weight) not in (int, float)
            or not 0 <= weight < 1e9
        ):
            raise problem
        if weight and size[2] != 1:
            raise ConfigError(
                f"{_SIZES}: {size} is the size of a video, but this benchmark only makes images: "
                "the third number must be 1"
            )
        if weight:
            sizes[size[:2]] = float(weight)
    if not sizes:
        raise problem
    return sizes
