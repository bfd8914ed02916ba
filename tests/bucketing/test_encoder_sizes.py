"""Test that every image fits into a padded size of the encoder, with little padding."""

import random

import numpy as np
import pytest
import torch

from tests.multimodal.grid_models import KINDS
from vllm.bucketing.encoder_sizes import (
    encoder_sizes,
    fraction_of_padding,
    split_into_sizes,
)
from vllm.multimodal.families.llava_next import LlavaNextFamily
from vllm.multimodal.families.qwen2_vl import Qwen2VLFamily
from vllm.multimodal.images.settings import with_defaults

SEED = 20261127
MULTIPLE = 16
GIVEN = {
    "default": (),
    "published": (1600, 3136, 4096, 6400, 7744, 9216, 12544),
    "one": (5,),
    "larger than any image": (10**6,),
    "odd": (1, 3, 17, 4099, 10**5),
}
PHOTOGRAPHS = [
    (4000, 3000),
    (4032, 3024),
    (6000, 4000),
    (3840, 2160),
    (1920, 1080),
    (2560, 1440),
    (1366, 768),
    (1280, 720),
    (1170, 2532),
    (1080, 2400),
    (1024, 1024),
    (800, 600),
    (640, 480),
    (512, 512),
    (320, 240),
]
"""Width and height of pictures of usual cameras, telephones and screens."""


def grid_family(max_pixels: int) -> Qwen2VLFamily:
    settings = {"size": {"shortest_edge": 56 * 56, "longest_edge": max_pixels}}
    vision = KINDS["qwen2_vl"].vision
    kind = {"image_processor_type": "Qwen2VLImageProcessor"}
    return Qwen2VLFamily({"vision_config": vision}, with_defaults({**kind, **settings}))


def patches_of(width: float, height: float, max_pixels: int) -> int:
    """Return the number of patches of a Qwen2-VL image, by the published rule.

    Its sides are multiples of 28 pixels, and its number of pixels is within the limits.
    """
    sides = [max(28, round(side / 28) * 28) for side in (width, height)]
    pixels = sides[0] * sides[1]
    if pixels > max_pixels:
        scale = (width * height / max_pixels) ** 0.5
        sides = [max(28, int(side / scale / 28) * 28) for side in (width, height)]
    elif pixels < 56 * 56:
        scale = (56 * 56 / (width * height)) ** 0.5
        sides = [-(-int(np.ceil(side * scale)) // 28) * 28 for side in (width, height)]
    return sides[0] * sides[1] // 14**2


def shapes_of(rng: random.Random, count: int):
    """Return widths and heights for all accepted sizes and aspect ratios."""
    for _ in range(count):
        side, ratio = 2 ** rng.uniform(0, 13), 2 ** rng.uniform(-7, 7)
        yield max(1.0, side * ratio**0.5), max(1.0, side / ratio**0.5)


def sizes_of_photographs(rng: random.Random, count: int):
    """Return widths and heights of common photographs at several scales, slightly cropped."""
    for _ in range(count):
        width, height = rng.choice(PHOTOGRAPHS)
        scale = rng.choice([1, 1, 0.75, 0.5, 0.25])
        yield width * scale * rng.uniform(0.8, 1), height * scale * rng.uniform(0.8, 1)


def assert_covers(counts, sizes):
    groups = split_into_sizes(counts, sizes)
    assert [index for indices, _ in groups for index in indices] == list(range(len(counts)))
    for indices, size in groups:
        total = sum(counts[index] for index in indices)
        smaller = [each for each in sizes if each < size]
        assert size in sizes and total <= size and all(total > each for each in smaller)


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("max_pixels", [28 * 28 * 1280, 12_845_056, 24 * 28 * 28])
def test_every_image_of_any_size_has_room(max_pixels, given):
    rng = random.Random(SEED)
    largest = len(grid_family(max_pixels).largest().tensors["pixels"])
    sizes = encoder_sizes(16, largest, "patches", given)
    assert list(sizes) == sorted(set(sizes)) and not any(size % MULTIPLE for size in sizes)
    assert largest <= sizes[-1] < largest + MULTIPLE
    counts = [patches_of(*shape, max_pixels) for shape in shapes_of(rng, 10_000)]
    assert max(counts) <= largest
    assert_covers(counts, sizes)


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_every_number_of_tiles_has_room(given):
    rng = random.Random(SEED)
    tower = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
    settings = {"image_processor_type": "LlavaNextImageProcessor", "crop_size": 336}
    settings |= {"size": {"shortest_edge": 336}}
    family = LlavaNextFamily({"vision_config": tower}, with_defaults(settings))
    largest = len(family.largest().tensors["pixels"])
    sizes = encoder_sizes(1, largest, "images", given)
    shapes = [(int(h), int(w)) for w, h in shapes_of(rng, 10_000)]
    counts = [family.layout_of(*shape).num_tiles for shape in shapes]
    assert max(counts) == largest == 5
    assert_covers(counts, sizes)
    assert_covers([1] * 1000, encoder_sizes(1, 1, "images", given))
    if not given:
        assert fraction_of_padding(counts, sizes) < 0.1
        assert_covers([1] * 1000, encoder_sizes(1, 1, "images", (3, 6)))


@pytest.mark.parametrize(("largest", "given"), [(1, (2, 6)), (13, (2, 6)), (13, ())])
def test_numbers_of_tiles_are_not_rounded(largest, given):
    sizes = encoder_sizes(1, largest, "tiles", given)
    assert set(given) <= set(sizes) and max(sizes) == max(largest, *given, 8 * (not given))
    if not given:
        counts = list(range(1, largest + 1))
        assert all(fraction_of_padding([count], sizes) <= 0.25 for count in counts)


@pytest.mark.parametrize("max_pixels", [28 * 28 * 1280, 12_845_056])
def test_less_than_a_quarter_of_photographs_is_padding(max_pixels):
    rng = random.Random(SEED)
    largest = len(grid_family(max_pixels).largest().tensors["pixels"])
    sizes = encoder_sizes(16, largest, "patches")
    counts = [patches_of(*shape, max_pixels) for shape in sizes_of_photographs(rng, 10_000)]
    padding = fraction_of_padding(counts, sizes)
    assert 0 < padding < 0.25


def test_the_rule_of_these_tests_is_that_of_the_image_processor():
    pytest.importorskip("PIL", reason="images need Pillow")
    rng = random.Random(SEED)
    limit = 24 * 28 * 28
    family = grid_family(limit)
    for width, height in [(28, 28), (300, 40), (640, 480), (31, 500), (2000, 1500)]:
        shape = (height + rng.randrange(5), width + rng.randrange(5))
        pixels = family.process(np.zeros((*shape, 3), np.uint8)).tensors["pixels"]
        assert torch.from_numpy(pixels).shape[0] == patches_of(shape[1], shape[0], limit)
