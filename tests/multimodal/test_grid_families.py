"""Test that images as grids of patches have the pixels, tokens and positions of transformers."""

from importlib import import_module
from pkgutil import iter_modules

import numpy as np
import pytest
import torch

from tests.multimodal.grid_models import KINDS, grid_model, images, tensors_of
from vllm.errors import ConfigError, RequestError
from vllm.model_executor.media import families as encoders
from vllm.model_executor.media.encoder import MediaEncoder
from vllm.multimodal import families
from vllm.multimodal.images.settings import override_settings, with_defaults
from vllm.multimodal.interface.family import MediaFamily, PlacedItem
from vllm.transformers_utils.transformers_version import is_version_4

pytest.importorskip("PIL", reason="images need Pillow")
pytestmark = pytest.mark.skipif(
    is_version_4(), reason="this transformers has other configs for parts"
)

GRID_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v")
TOKEN_ID = 7
SIZES = [(100, 300), (40, 50), (336, 336), (30, 5900), (700, 28), (28, 28), (61, 3), (1200, 900)]


@pytest.mark.parametrize("name", GRID_FAMILIES)
def test_pixels_and_tokens_are_those_of_the_image_processor(name):
    known = grid_model(name)
    family = known.make_family()
    for image in images(*SIZES):
        wanted = known.processor.preprocess(images=[image], return_tensors="pt")
        found = family.process(image)
        assert found.grid == tuple(wanted["image_grid_thw"][0].tolist())
        tensors = tensors_of(found)
        assert tensors["pixels"].dtype == torch.uint8
        mean, deviation = tensors["statistics"][:, :, None]
        scaled = (tensors["pixels"].unflatten(1, (3, -1)).float() - mean) / deviation
        torch.testing.assert_close(scaled.flatten(1), wanted["pixel_values"], rtol=0, atol=2e-6)
        expansion = family.expand(found.grid, {family.placeholder: TOKEN_ID}.__getitem__)
        count = int(wanted["image_grid_thw"].prod()) // 4
        assert expansion.token_ids == [TOKEN_ID] * count
        assert expansion.is_embedding == [True] * count


LIMITS = [(4, 1280), (64, 16384), (1, 1), (1, 50), (4, 211), (90, 90), (300, 301)]
"""Fewest and most blocks of an image."""


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", ["qwen2_vl", "glm4v"])
def test_no_image_has_more_patches_than_the_largest(name, limits):
    known = grid_model(name)
    block = (known.settings["patch_size"] * 2) ** 2
    fewest, most = (n * block * (2 if name == "glm4v" else 1) for n in limits)
    size = {"shortest_edge": fewest, "longest_edge": most}
    largest = known.make_family(size=size).largest()
    count = largest.grid[1] * largest.grid[2]
    assert largest.tensors["pixels"].shape == (count, 3 * block // 2)
    assert not largest.tensors["pixels"].any()
    generator = np.random.default_rng(5)
    heights = np.exp(generator.uniform(np.log(14), np.log(8000), 1500)).astype(int)
    widths = (heights * np.exp(generator.uniform(-5.2, 5.2, 1500))).astype(int).clip(1)
    seen = [
        known.processor.get_number_of_image_patches(
            int(height), int(width), {"min_pixels": fewest, "max_pixels": most, "size": size}
        )
        for height, width in zip(heights, widths, strict=True)
        if max(height, width) <= 200 * min(height, width)
    ]
    assert 0.8 * count <= max(seen) <= count


@pytest.mark.parametrize("name", GRID_FAMILIES)
def test_positions_are_those_of_the_model(name):
    known = grid_model(name)
    family = known.make_family()
    generator = np.random.default_rng(4)
    for texts in ((3, 4), (0, 5), (5, 0), (0, 0), (2, 1, 7), (0, 1, 1, 0), (9,)):
        grids = [(1, *(2 * generator.integers(1, 9, 2)).tolist()) for _ in texts[1:]]
        items, kinds = [], [0] * texts[0]
        for grid, behind in zip(grids, texts[1:], strict=True):
            count = grid[1] * grid[2] // 4
            items.append(PlacedItem(len(kinds), count, grid, ((len(kinds), count),)))
            kinds += [1] * count + [0] * behind
        wanted, delta = known.model.model.get_rope_index(
            torch.zeros(1, len(kinds), dtype=torch.long),
            torch.tensor([kinds]),
            torch.tensor(grids) if grids else None,
        )
        found = family.positions(len(kinds), items)
        np.testing.assert_array_equal(found, wanted[:, 0].numpy())
        assert int(found.max()) + 1 - len(kinds) == int(delta)


def test_images_next_to_each_other_follow_each_other():
    family = grid_model("qwen2_vl").make_family()
    items = [PlacedItem(0, 2, (1, 2, 4), ((0, 2),)), PlacedItem(2, 1, (1, 2, 2), ((2, 1),))]
    found = family.positions(4, items)
    assert found.tolist() == [[0, 0, 2, 3], [0, 0, 2, 3], [0, 1, 2, 3]]


ROW_FAMILIES = ("pixtral", "mistral3")
ROW_TOKENS = {"[IMG]": 10, "[IMG_BREAK]": 12, "[IMG_END]": 13}


@pytest.mark.parametrize("name", ROW_FAMILIES)
def test_rows_of_an_image_end_with_a_token(name):
    known = grid_model(name)
    family, side = known.make_family(), known.settings["patch_size"]["height"]
    for image in images(*SIZES):
        wanted = known.processor.preprocess(images=[image], return_tensors="pt")
        found = family.process(image)
        height, width = (int(n) for n in wanted["image_sizes"][0])
        assert found.grid == (1, height // 8, width // 8)
        assert family.positions(100, [PlacedItem(3, 50, found.grid, ())]) is None
        tensors = tensors_of(found)
        mean, deviation = tensors["statistics"][:, :, None]
        scaled = (tensors["pixels"].unflatten(1, (3, -1)).float() - mean) / deviation
        blocks = wanted["pixel_values"][0].unflatten(2, (-1, side // 8, 8))
        blocks = blocks.unflatten(1, (-1, side // 8, 8)).permute(1, 4, 2, 5, 0, 3, 6)
        pixels = blocks.flatten(0, 3).flatten(1)
        torch.testing.assert_close(scaled.flatten(1), pixels, rtol=0, atol=2e-6)
        expansion = family.expand(found.grid, ROW_TOKENS.__getitem__)
        row = [10] * (width // side) + [12]
        assert expansion.token_ids == [*(row * (height // side))[:-1], 13]
        assert expansion.is_embedding == [token == 10 for token in expansion.token_ids]
        assert sum(expansion.is_embedding) * (side // 8) ** 2 == len(tensors["pixels"])


@pytest.mark.parametrize("size", [{"longest_edge": 200}, {"height": 120, "width": 230}, 97])
@pytest.mark.parametrize("name", ROW_FAMILIES)
def test_no_image_has_more_tokens_than_the_largest(name, size):
    family = grid_model(name).make_family(size=size)
    largest = family.largest()
    count = len(largest.tensors["pixels"])
    sizes = [(120, 230), (230, 120), (97, 97), (200, 200), (199, 200), (400, 777), (5, 100)]
    seen = [len(family.process(image).tensors["pixels"]) for image in images(*sizes)]
    assert max(seen) == count


WRONG_OF_ROWS = [
    ({"size": {"shortest_edge": 9}}, "size is .* must be an object with longest_edge, or with hei"),
    ({"do_resize": None}, "do_resize is None; it must be true"),
    ({"do_center_crop": True}, "do_center_crop is True; it must be false"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG_OF_ROWS)
def test_a_setting_of_pixtral_that_cannot_be_used_is_named(settings, message):
    with pytest.raises(ConfigError, match=f"processor_config.json: {message}"):
        grid_model("pixtral").make_family(**settings)


WRONG = [
    ({"size": {"shortest_edge": 0, "longest_edge": 9}}, "size.shortest_edge is 0; it must be pix"),
    ({"size": {"shortest_edge": 9}}, "size.longest_edge is None; it must be pixels"),
    ({"size": 5}, "size is 5; it must be an object with shortest_edge and longest_edge"),
    ({"max_pixels": "many"}, "max_pixels is 'many'; it must be pixels of an image"),
    ({"min_pixels": 900, "max_pixels": 800}, r"min_pixels is 900; it must be at most max_.*800"),
    ({"patch_size": 15}, "patch_size is 15; it must be vision_config.patch_size of .*, 14"),
    ({"merge_size": 3}, "merge_size is 3; it must be vision_config.spatial_merge_size of .*, 2"),
    ({"do_resize": False}, "do_resize is False; it must be true"),
    ({"image_std": [0, 1, 1]}, "image_std is .* it must be positive numbers"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_a_setting_that_cannot_be_used_is_named(settings, message):
    with pytest.raises(ConfigError, match=f"processor_config.json: {message}"):
        grid_model("qwen2_vl").make_family(**settings)


def test_limits_have_two_spellings():
    known = grid_model("qwen2_vl")
    pixels = {"min_pixels": 4 * 784, "max_pixels": 11 * 784}
    for settings in (pixels, {"size": pixels}):
        found = known.make_family(**settings)
        # The largest grid is the grid of a very long image.
        assert found.largest().grid == (1, 2, 92)
        assert found.process(images((300, 300))[0]).grid == (1, 6, 6)


def test_limits_by_name_have_no_effect_in_glm_4_1v_as_in_transformers():
    known = grid_model("glm4v")
    (image,) = images((100, 300))
    usual = known.make_family().process(image).grid
    assert known.make_family(min_pixels=784, max_pixels=784).process(image).grid == usual


def test_an_override_of_the_size_replaces_both_spellings():
    known = grid_model("qwen2_vl")
    named = {"image_processor_type": "Qwen2_5_VLImageProcessor", "max_pixels": 9999}
    settings = with_defaults(named)
    assert settings["image_processor_type"] == "Qwen2VLImageProcessor"
    size = {"shortest_edge": 4 * 784, "longest_edge": 11 * 784}
    family = known.family(known.config, override_settings(settings, {"size": size}))
    assert family.process(images((300, 300))[0]).grid == (1, 6, 6)
    family = known.family(known.config, override_settings(settings, {"max_pixels": 11 * 784}))
    assert family.process(images((300, 300))[0]).grid == (1, 6, 6)


def test_the_image_processor_of_glm_4_6v_is_that_of_glm_4_1v():
    settings = with_defaults({"image_processor_type": "Glm46VImageProcessorFast"})
    assert settings == with_defaults({"image_processor_type": "Glm4vImageProcessor"})


def test_every_family_has_an_encoder_of_its_name():
    names = {module.name for module in iter_modules(families.__path__)}
    assert set(KINDS) <= names
    for name in names:
        family = import_module(f"{families.__name__}.{name}").Family
        encoder = import_module(f"{encoders.__name__}.{name}").Encoder
        assert issubclass(family, MediaFamily)
        assert issubclass(encoder, MediaEncoder)


@pytest.mark.parametrize("name", KINDS)
def test_an_image_that_is_too_long_is_refused(name):
    with pytest.raises(RequestError, match=r"6000 x 29 pixels cannot be used: .* 200 times"):
        grid_model(name).make_family().process(images((29, 6000))[0])
