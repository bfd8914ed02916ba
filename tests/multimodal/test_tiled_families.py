"""Test pixels and tokens of families whose images are tiles, against transformers."""

import json
import sys
from dataclasses import asdict
from importlib import import_module
from pkgutil import iter_modules

import numpy as np
import pytest
import torch

from tests.loops import loop_over
from tests.multimodal.grid_models import image_processor_class
from tests.multimodal.tiled_models import LLAMA, PINPOINTS, SIDE, TOWER
from vllm.errors import ConfigError, RequestError
from vllm.model_executor.media.vision.layers import normalize
from vllm.multimodal import families
from vllm.multimodal.families import idefics3 as idefics3_family
from vllm.multimodal.families import internvl as internvl_family
from vllm.multimodal.families import mllama as mllama_family
from vllm.multimodal.families.idefics3 import newline_tokens
from vllm.multimodal.families.llava import CLIP_OR_SIGLIP
from vllm.multimodal.images.hf_processor import make_image_processor as make_hf_processor
from vllm.multimodal.images.settings import (
    DEFAULTS,
    override_settings,
    read_processor_settings,
    with_defaults,
)
from vllm.multimodal.images.tower_config import read_tower_config
from vllm.multimodal.interface.family import PlacedItem
from vllm.multimodal.job import family_class
from vllm.multimodal.processor_settings import read_settings
from vllm.transformers_utils.transformers_version import is_version_4

pytest.importorskip("PIL", reason="image processors need Pillow")

KINDS = (
    *(*CLIP_OR_SIGLIP, *idefics3_family.TOWERS, *internvl_family.TOWERS),
    *mllama_family.TOWERS,
)
TOKENS = ["<unk>", "<pad>", "a", "b", "<image>"]
SIZES = [
    (50, 40),
    (161, 184),
    (28, 28),
    (1, 1),
    (300, 7),
    # transformers 4 mistakes a side of 3 pixels (after scaling) for the color channels.
    *([] if is_version_4() else [(7, 300), (3, 5), (200, 3)]),
    (168, 224),
    (300, 300),
]
"""Height and width of images."""


def random_sizes(number):
    generator = np.random.default_rng(1)
    return [*SIZES, *(tuple(map(int, generator.integers(1, 400, 2))) for _ in range(number))]


def make_pixels(height, width):
    generator = np.random.default_rng(height * 1000 + width)
    return generator.integers(0, 256, (height, width, 3), dtype=np.uint8)


def make_tokenizer(tokens=TOKENS, **names):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")),
        unk_token="<unk>",
        pad_token="<pad>",
        extra_special_tokens=names,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": tokens[2:]})
    return tokenizer


def make_image_processor(settings):
    settings = dict(settings)
    return image_processor_class(settings.pop("image_processor_type"))(**settings)


def make_family(name, config, settings):
    return import_module(f"vllm.multimodal.families.{name}").Family(config, settings)


def tokens_of(family, grid, tokenizer):
    expansion = family.expand(grid, tokenizer.convert_tokens_to_ids)
    assert len(expansion.token_ids) == len(expansion.is_embedding)
    return expansion.token_ids


def make_llava(name, settings, **config):
    """Return a family of LLaVA, and the Processor of transformers."""
    import transformers

    config = {"vision_config": {"model_type": "clip_vision_model", **TOWER}, **config}
    settings = with_defaults(
        {
            "size": {"shortest_edge": SIDE},
            "crop_size": {"height": SIDE, "width": SIDE},
            "image_grid_pinpoints": PINPOINTS,
            **settings,
        }
    )
    family = make_family({"Llava": "llava", "LlavaNext": "llava_next"}[name], config, settings)
    processor = getattr(transformers, f"{name}Processor")(
        make_image_processor(settings),
        make_tokenizer(),
        patch_size=TOWER["patch_size"],
        vision_feature_select_strategy=config.get("vision_feature_select_strategy", "default"),
        num_additional_image_tokens=int("clip" in config["vision_config"]["model_type"]),
    )
    return family, processor


def llava(settings=None, **config):
    settings = {"image_processor_type": "CLIPImageProcessor", **(settings or {})}
    return make_llava("Llava", settings, **config)


def llava_next(settings=None, **config):
    settings = {"image_processor_type": "LlavaNextImageProcessor", **(settings or {})}
    return make_llava("LlavaNext", settings, **config)


def gemma3(settings=None, **config):
    """Return a family, and the Processor of transformers."""
    from transformers import Gemma3Processor

    config = {"vision_config": TOWER, "mm_tokens_per_image": 4, **config}
    settings = with_defaults(
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": SIDE, "width": SIDE},
            "do_convert_rgb": None,
            **(settings or {}),
        }
    )
    names = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    tokenizer = make_tokenizer([*TOKENS[:4], "\n\n", *names.values()], **names)
    family = make_family("gemma3", config, settings)
    return family, Gemma3Processor(make_image_processor(settings), tokenizer, image_seq_length=4)


def idefics3(settings=None, kind="idefics3_vision", **config):
    """Return a family, and the Processor of transformers."""
    from transformers import Idefics3Processor

    config = {"vision_config": {"model_type": kind, **TOWER}, "scale_factor": 2, **config}
    settings = with_defaults(
        {
            "image_processor_type": "Idefics3ImageProcessor",
            "max_image_size": {"longest_edge": SIDE},
            "size": {"longest_edge": 4 * SIDE},
            **(settings or {}),
        }
    )
    edges = ["\n", "\n\n", "<fake_token_around_image>", "<global-img>"]
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer = make_tokenizer([*TOKENS, *edges, *tiles])
    if is_version_4() and settings["image_processor_type"] != "Idefics3ImageProcessor":
        pytest.skip("the Processor of this transformers does not take others")
    family = make_family("idefics3", config, settings)
    return family, Idefics3Processor(make_image_processor(settings), tokenizer, image_seq_len=4)


def internvl(settings=None, **config):
    """Return a family, and a stand-in for the Processor of transformers, which needs torchvision
    because it can also read videos."""
    config = {"vision_config": TOWER, "downsample_ratio": 0.5, **config}
    settings = with_defaults(
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": SIDE, "width": SIDE},
            **(settings or {}),
        }
    )
    image_processor = make_image_processor({**settings, "crop_to_patches": True})
    tokenizer = make_tokenizer([*TOKENS[:4], "<img>", "<IMG_CONTEXT>", "</img>"])

    def process(images, text, **options):
        found = image_processor(images, **options)
        soft = "<IMG_CONTEXT>" * 4 * int(found["num_patches"][0])
        text = text.replace("<IMG_CONTEXT>", f"<img>{soft}</img>")
        return {**found, "input_ids": tokenizer(text, return_tensors="np")["input_ids"]}

    process.tokenizer = tokenizer
    return make_family("internvl", config, settings), process


def mllama(settings=None, **vision):
    """Return a family, and the Processor of transformers."""
    from transformers import MllamaProcessor

    config = {"vision_config": {**TOWER, **vision}}
    settings = with_defaults(
        {
            "image_processor_type": "MllamaImageProcessor",
            "size": {"height": SIDE, "width": SIDE},
            **(settings or {}),
        }
    )
    tokenizer = make_tokenizer([*TOKENS[:4], "<|image|>", "<|python_tag|>"])
    tokenizer.bos_token = "a"
    family = make_family("mllama", config, settings)
    return family, MllamaProcessor(make_image_processor(settings), tokenizer)


SIGLIP = {"image_processor_type": "SiglipImageProcessor", "size": {"height": SIDE, "width": SIDE}}
FAMILIES = {
    "LLaVA": lambda: llava(),
    "LLaVA, all tokens": lambda: llava(vision_feature_select_strategy="full"),
    "LLaVA, sides are padded": lambda: llava(
        {"image_processor_type": "LlavaImageProcessor", "do_pad": True}
    ),
    "LLaVA, SigLIP": lambda: llava(
        SIGLIP,
        vision_config={"model_type": "siglip_vision_model", **TOWER},
        vision_feature_select_strategy="full",
    ),
    "LLaVA-NeXT": lambda: llava_next(),
    "InternVL": lambda: internvl({"crop_to_patches": False, "max_patches": 5}),
    "InternVL, one tile": lambda: internvl({"max_patches": 1}),
    "InternVL, at least 3": lambda: internvl({"min_patches": 3, "size": SIDE}),
    "Idefics3": lambda: idefics3(),
    "Idefics3, odd size": lambda: idefics3({"size": {"longest_edge": 3 * SIDE + 1}}),
    "Idefics3, size of a tile": lambda: idefics3({"size": {"longest_edge": SIDE}}),
    "Idefics3, without tiles": lambda: idefics3({"do_image_splitting": False}),
    "SmolVLM": lambda: idefics3(
        {"image_processor_type": "SmolVLMImageProcessor"}, "smolvlm_vision"
    ),
    "Gemma 3": lambda: gemma3(),
    "Llama 3.2 Vision": lambda: mllama(),
    "Llama 3.2 Vision, two tiles": lambda: mllama({"max_image_tiles": 2}, max_num_tiles=2),
    "Granite Vision": lambda: llava_next(
        {"size": {"height": SIDE, "width": SIDE}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        vision_config={"model_type": "siglip_vision_model", **TOWER},
        vision_feature_select_strategy="full",
        vision_feature_layer=[-3, -1],
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_pixels_and_tokens_are_those_of_the_processor(name):
    family, processor = FAMILIES[name]()
    largest = len(family.largest().tensors["pixels"])
    found = []
    for height, width in random_sizes(8):
        image = make_pixels(height, width)
        want = processor(
            images=[image],
            text=f"a{family.placeholder}b",
            input_data_format="channels_last",
            return_tensors="np",
        )
        got = family.process(image)
        pixels = got.tensors["pixels"]
        assert pixels.dtype == np.uint8
        found.append(len(pixels))
        statistics = torch.from_numpy(got.tensors["statistics"]).expand(len(pixels), -1, -1)
        ours = normalize(torch.from_numpy(pixels), statistics, torch.float32).numpy()
        theirs = np.asarray(want["pixel_values"])
        if "aspect_ratio_ids" in want:
            theirs = theirs[0, 0, : want["aspect_ratio_mask"].sum()]
            assert got.tensors["layout"].tolist() == want["aspect_ratio_ids"][0].tolist()
        theirs = theirs.reshape(ours.shape)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
        tokens = tokens_of(family, got.grid, processor.tokenizer)
        around = [processor.tokenizer(text)["input_ids"] for text in family.text_around]
        tokens = [*around[0], *tokens, *around[1]]
        assert want["input_ids"][0].tolist()[1:-1] == tokens, (height, width)
    assert max(found) == largest


@pytest.mark.parametrize(
    "prompt",
    [
        *("IIaIa", "IaIaI", "aaa", "I", "aI", "aII", "IIIaaIIaI", "aaIIaIIaaIIa", "aIaa"),
        *("IaaI", "aIIII", "IaI"),
    ],
)
def test_a_token_sees_the_tiles_that_transformers_says(prompt):
    from transformers.models.mllama.processing_mllama import (
        convert_sparse_cross_attention_mask_to_dense,
        get_cross_attention_token_mask,
    )

    image, length = 7, len(prompt)
    ids = [image if each == "I" else 0 for each in prompt]
    family, processor = mllama()
    grids = [(1, 1), (2, 2), (3, 1), (1, 2), (4, 1)]
    starts = [index for index, each in enumerate(ids) if each == image]
    items = [PlacedItem(start, 1, grids[n % 5], ()) for n, start in enumerate(starts)]
    tiles = [rows * columns for rows, columns in (item.grid for item in items)]
    ours = np.zeros((length + 3, len(items), 4), np.int64)
    for n, (begin, end) in enumerate(family.seen_by(items)):
        expansion = family.expand(items[n].grid, processor.tokenizer.convert_tokens_to_ids)
        num_states = expansion.num_states
        assert (len(expansion.token_ids), expansion.is_embedding) == (1, [False])
        ours[begin:end, n, : num_states // 17] = 1
    theirs = np.zeros((length, 0, 4), np.int64)
    if items:
        ranges = get_cross_attention_token_mask(ids, image)
        (theirs,) = convert_sparse_cross_attention_mask_to_dense([ranges], [tiles], 4, length)
    np.testing.assert_array_equal(ours[:length], theirs)
    # Generated tokens see the same tiles as the last token of the prompt.
    np.testing.assert_array_equal(ours[length:], np.repeat(theirs[-1:], 3, 0))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_largest_image_is_black_and_has_tokens(name):
    family, processor = FAMILIES[name]()
    largest = family.largest()
    assert largest.tensors["pixels"].dtype == np.uint8
    assert not largest.tensors["pixels"].any()
    assert tokens_of(family, largest.grid, processor.tokenizer)


@loop_over("name", FAMILIES)
@loop_over("size", [(1, 201), (5000, 2)])
def test_images_that_are_too_long_are_refused(name, size):
    family, _ = FAMILIES[name]()
    with pytest.raises(RequestError, match=f"{size[1]} x {size[0]} pixels.*at most 200 times"):
        family.process(make_pixels(*size))


def test_defaults_of_towers_are_those_of_transformers():
    from transformers import CONFIG_MAPPING, AutoConfig

    for kind in KINDS:
        if is_version_4() and kind not in CONFIG_MAPPING:
            continue  # in transformers 4, some towers have no config of their own
        want = AutoConfig.for_model(kind)
        for field, value in asdict(read_tower_config({}, (kind,))).items():
            theirs = getattr(want, field) if hasattr(want, field) else want.norm_eps
            assert value == (theirs[0] if isinstance(theirs, tuple | list) else theirs), field


def test_defaults_are_those_of_transformers():
    for name, defaults in DEFAULTS.items():
        try:
            found = image_processor_class(name)().to_dict()
        except (AttributeError, ModuleNotFoundError):
            assert is_version_4()  # which does not have all of them
            continue
        for key, value in defaults.items():
            if value is not None and found.get(key) is not None:
                want = found[key]
                want = list(want) if isinstance(want, tuple) else want
                assert value == want, (name, key)


CLIP = {"image_processor_type": "CLIPImageProcessor", "crop_size": SIDE}


@pytest.mark.parametrize(
    "files",
    [
        {"preprocessor_config.json": CLIP},
        {"preprocessor_config.json": CLIP | {"image_processor_type": "CLIPImageProcessorFast"}},
        {"preprocessor_config.json": {"feature_extractor_type": "CLIPFeatureExtractor", **CLIP}},
        {"processor_config.json": {"image_processor": CLIP, "patch_size": 14}},
        {
            "processor_config.json": {"image_processor": CLIP},
            "preprocessor_config.json": CLIP | {"crop_size": 1},
        },
        {"processor_config.json": {"patch_size": 14}, "preprocessor_config.json": CLIP},
    ],
)
def test_settings_are_in_one_of_two_files(tmp_path, files):
    for name, content in files.items():
        if "feature_extractor_type" in content:
            content = {k: v for k, v in content.items() if k != "image_processor_type"}
        (tmp_path / name).write_text(json.dumps(content))
    settings = read_processor_settings(tmp_path)
    assert settings["image_processor_type"] == "CLIPImageProcessor"
    assert settings["crop_size"] == SIDE
    assert settings["image_mean"] == [0.48145466, 0.4578275, 0.40821073]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "neither preprocessor_config.json nor image_processor in processor_config.json"),
        ({"processor_config.json": {"image_processor": 3}}, "image_processor is 3"),
        ({"preprocessor_config.json": {}}, "image_processor_type is None.*CLIPImageProcessor"),
        (
            {"preprocessor_config.json": {"image_processor_type": "X"}},
            "image_processor_type is 'X'",
        ),
    ],
)
def test_folders_without_usable_settings(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        read_processor_settings(tmp_path)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("TinyImageProcessor", {}, "has no TinyImageProcessor: install a later version"),
        ("CLIPImageProcessor", {"size": "large"}, "CLIPImageProcessor .* does not accept"),
    ],
)
def test_image_processors_that_cannot_be_made(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_hf_processor(name, settings)


def test_a_null_is_a_switch_that_is_off_or_a_default():
    found = with_defaults({**CLIP, "do_center_crop": None, "size": None, "other": None})
    assert (found["do_center_crop"], found["other"]) == (False, None)
    assert found["size"] == {"shortest_edge": 224}


def test_settings_that_name_no_class_are_those_of_the_model(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_std": 0.25}))
    known = [family_class(each.name) for each in iter_modules(families.__path__)]
    for family in (each for each in known if "image" in each.modalities):
        found = read_settings(family, tmp_path)
        assert found["image_processor_type"] == family.image_processor, family
        assert (found["image_std"], found["do_resize"]) == (0.25, True), family


def test_an_integer_is_a_square_size_also_where_transformers_scales_one_side():
    family, _ = llava(
        {**SIGLIP, "size": SIDE},
        vision_config={"model_type": "siglip_vision_model", **TOWER},
        vision_feature_select_strategy="full",
    )
    assert family.process(make_pixels(50, 40)).tensors["pixels"].shape == (1, 3, SIDE, SIDE)


def test_without_pillow_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"pip install .vllm\[image\]"):
        make_hf_processor("CLIPImageProcessor", {})


def test_overrides_replace_settings_and_unknown_ones_are_refused():
    settings = with_defaults(CLIP)
    changed = override_settings(settings, {"do_center_crop": False})
    assert changed == {**settings, "do_center_crop": False}
    with pytest.raises(
        ConfigError, match=r"CLIPImageProcessor has no setting 'crop'; it has .*crop"
    ):
        override_settings(settings, {"crop": 3})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop_size": {"height": 30, "width": 28}}, "crop_size is .*must be 28 x 28 pixels"),
        ({"size": {"shortest_edge": 28.5}}, "size is .*each from 1 to"),
        ({"crop_size": "large"}, "crop_size is 'large'.*height and width"),
        ({"crop_size": {"height": 28}}, "crop_size is .*height and width"),
        ({"do_center_crop": False}, "size is {'shortest_edge': 28}.*must be 28 x 28 pixels"),
        ({"do_center_crop": False, "do_resize": False}, "size is .*must be 28 x 28 pixels"),
        ({"do_resize": 1, "do_center_crop": False}, "do_resize is 1.*true or false"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std is .*positive numbers"),
        ({"image_mean": [0.5, 0.5]}, "image_mean is .*one for each of 3 channels"),
        ({"rescale_factor": "1/255"}, "rescale_factor is '1/255'"),
        ({"resample": 9}, "resample is 9.*from 0 to 5"),
    ],
)
def test_settings_that_cannot_be_used_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        llava(settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_grid_pinpoints": []}, r"image_grid_pinpoints is \[\].*of multiples of 28"),
        ({"image_grid_pinpoints": [[28, 56], [28, 30]]}, "pinpoints is .*of multiples of 28"),
        ({"image_grid_pinpoints": [[28, 56, 84]]}, "pinpoints is .*of multiples of 28"),
        ({"crop_size": {"height": 56, "width": 56}}, "crop_size is .*must be 28 x 28 pixels"),
    ],
)
def test_layouts_that_cannot_be_used_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        llava_next(settings)


@pytest.mark.parametrize(
    ("settings", "config", "message"),
    [
        ({"do_pan_and_scan": True}, {}, "do_pan_and_scan is True; it must be false"),
        ({}, {"mm_tokens_per_image": 9}, "mm_tokens_per_image is 9.*divisor of 4"),
        ({}, {"mm_tokens_per_image": 64}, "mm_tokens_per_image is 64.*from 1 to 16"),
    ],
)
def test_values_that_gemma_3_cannot_use_are_named(settings, config, message):
    with pytest.raises(ConfigError, match=message):
        gemma3(settings, **config)


@pytest.mark.parametrize(
    ("settings", "vision", "message"),
    [
        ({"do_pad": False}, {}, "do_pad is False; it must be true"),
        ({"max_image_tiles": 2}, {}, r"max_image_tiles is 2; .*max_num_tiles .*\(4\)"),
        ({}, {"max_num_tiles": 2}, r"max_image_tiles is 4; .*max_num_tiles .*\(2\)"),
        ({"size": {"height": 30, "width": 30}}, {}, "size is .*must be 28 x 28 pixels"),
        ({}, {"supported_aspect_ratios": [[1, 1]]}, r"ratios is \[\[1, 1\]\]; .*in this order"),
    ],
)
def test_values_that_llama_3_2_cannot_use_are_named(settings, vision, message):
    with pytest.raises(ConfigError, match=message):
        mllama(settings, **vision)


@pytest.mark.parametrize(
    ("settings", "config", "message"),
    [
        ({"max_image_size": {"longest_edge": 56}}, {}, "max_image_size is .*'longest_edge': 28}"),
        ({"do_resize": False}, {}, "do_resize is False.*limits the number of tiles"),
        ({"size": {"height": 28, "width": 28}}, {}, "size is .*limits the number of tiles"),
        ({}, {"scale_factor": 3}, "scale_factor is 3.*divisor of 4"),
    ],
)
def test_values_that_idefics3_cannot_use_are_named(settings, config, message):
    with pytest.raises(ConfigError, match=message):
        idefics3(settings, **config)


@pytest.mark.parametrize(
    ("vocabulary", "want"),
    [(["\n", "\n\n"], [1]), (["\n"], [0, 0]), (["Ċ", "ĊĊ"], [1]), (["Ċ"], [0, 0])],
)
def test_line_breaks_are_one_token_where_the_vocabulary_has_it(vocabulary, want):
    def token_id(text):
        if text not in vocabulary:
            raise ConfigError(text)
        return vocabulary.index(text)

    assert newline_tokens(token_id, 2) == want
    with pytest.raises(ConfigError, match="no token for a line break"):
        vocabulary.clear()
        newline_tokens(token_id, 1)


@pytest.mark.parametrize(
    ("settings", "config", "message"),
    [
        ({"max_patches": 0}, {}, "max_patches is 0.*from 1 to 1024"),
        ({"max_patches": 2, "min_patches": 3}, {}, "min_patches is 3.*max_patches"),
        ({"size": {"height": 30, "width": 30}}, {}, "size is .*must be 28 x 28 pixels"),
        ({}, {"downsample_ratio": 0.3}, "downsample_ratio is 0.3.*divisor of 4"),
        ({}, {"downsample_ratio": 0}, "downsample_ratio is 0;.*divisor of 4"),
        ({}, {"vision_config": TOWER | {"image_size": [28, 56]}}, "image_size is .*two equal"),
    ],
)
def test_values_that_internvl_cannot_use_are_named(settings, config, message):
    with pytest.raises(ConfigError, match=message):
        internvl(settings, **config)


def test_the_layouts_need_an_embedding_for_each_patch():
    with pytest.raises(ConfigError, match="strategy is 'full'; it must be 'default' with a tower"):
        llava_next(vision_feature_select_strategy="full")


def test_an_image_of_which_nothing_would_be_left_is_refused():
    with pytest.raises(RequestError, match="1 x 200 pixels cannot be used: its shorter side"):
        llava_next()[0].process(make_pixels(200, 1))


def test_an_image_of_which_transformers_makes_too_few_tiles_is_refused(monkeypatch):
    """Version 4 does this for an image with a side that it scales to 3 pixels."""
    family = llava_next()[0]
    tiles = np.zeros((2, 3, SIDE, SIDE), np.uint8)
    monkeypatch.setattr(family, "processor", lambda pixels: {"pixel_values": [tiles]})
    with pytest.raises(
        RequestError, match=r"3 x 200 pixels .* needs 4 tiles, but .* transformers makes 2"
    ):
        family.process(make_pixels(200, 3))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vision_feature_layer": 4}, "vision_feature_layer is 4.*has 3 layers"),
        ({"vision_feature_layer": []}, r"vision_feature_layer is \[\]"),
        ({"vision_feature_select_strategy": "cls"}, "select_strategy is 'cls'.*'full'"),
        ({"vision_config": 3}, "vision_config is 3; it must be an object"),
        (
            {"vision_config": {"model_type": "pixtral"}},
            "model_type is 'pixtral'.*clip_vision_model",
        ),
        ({"vision_config": TOWER | {"patch_size": 29}}, "patch_size is 29.*image_size"),
        ({"vision_config": TOWER | {"num_attention_heads": 5}}, "multiple of num_attention_heads"),
        ({"vision_config": TOWER | {"hidden_size": 0}}, "vision_config.hidden_size is 0"),
        ({"vision_config": TOWER | {"num_channels": 1}}, "num_channels is 1; it must be 3"),
        ({"vision_config": TOWER | {"hidden_act": 1}}, "hidden_act is 1"),
        ({"vision_config": TOWER | {"layer_norm_eps": 0}}, "layer_norm_eps is 0"),
    ],
)
def test_values_of_config_json_that_cannot_be_used_are_named(config, message):
    with pytest.raises(ConfigError, match=f"^config.json: .*{message}"):
        llava(**{"text_config": LLAMA, **config})
