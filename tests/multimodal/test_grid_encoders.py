"""Test that encoders of images of any size give the embeddings of transformers."""

from copy import deepcopy

import pytest
import torch

from tests.hpu import simulated_hpu
from tests.multimodal.grid_models import grid_model, images, tensors_of
from vllm.errors import ConfigError
from vllm.model_executor.media.vision.packed_attention import attend_within, attend_within_windows
from vllm.transformers_utils.transformers_version import is_version_4

pytest.importorskip("PIL", reason="images need Pillow")
pytestmark = pytest.mark.skipif(
    is_version_4(), reason="this transformers has other configs for parts"
)

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "pixtral", "mistral3")
SIZES = [(100, 300), (40, 50), (336, 336), (28, 400)]


def embeddings_of(name: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return the embeddings that transformers makes of the images."""
    known = grid_model(name)
    model = known.model if dtype == torch.float32 else deepcopy(known.model).to(dtype)
    given = known.processor.preprocess(images=images(*SIZES), return_tensors="pt")
    name = "image_grid_thw" if "image_grid_thw" in given else "image_sizes"
    pixels = given["pixel_values"].to(dtype)
    found = model.model.get_image_features(pixels, **{name: given[name]})
    wanted = found.pooler_output
    counts = [len(each) for each in wanted]
    deep = getattr(found, "deepstack_features", None) or ()
    parts = [torch.cat(list(each)) for each in (wanted, *deep)]
    return list(torch.cat(parts, dim=1).split(counts))


def items_of(name: str) -> list[dict[str, torch.Tensor]]:
    family = grid_model(name).make_family()
    return [tensors_of(family.process(image)) for image in images(*SIZES)]


def assert_near(found: list[torch.Tensor], wanted: list[torch.Tensor], share: float) -> None:
    """Compare embeddings, relative to the largest of an image."""
    for ours, theirs in zip(found, wanted, strict=True):
        atol = share * float(theirs.abs().max())
        torch.testing.assert_close(ours.float(), theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_are_those_of_transformers(name):
    known, items, wanted = grid_model(name), items_of(name), embeddings_of(name)
    encoder = known.make_encoder()
    assert_near(encoder(items), wanted, 1e-5)
    for number, item in enumerate(items):  # encode each image without the other images
        assert_near(encoder([item]), wanted[number : number + 1], 1e-5)
    sizes = [encoder.size_of(item) for item in items]
    for size in (sum(sizes), sum(sizes) + 3, 1200):
        arguments = encoder.prepare(items[::-1], size)
        found = encoder.split(encoder.run(**arguments), items[::-1])
        assert_near(found, wanted[::-1], 1e-5)
    in_bfloat16 = known.make_encoder(torch.bfloat16)
    found = in_bfloat16(items)
    assert {each.dtype for each in found} == {torch.bfloat16}
    rounded = embeddings_of(name, torch.bfloat16)
    error, their_error = (
        (torch.cat(each) - torch.cat(wanted)).abs().mean() for each in (found, rounded)
    )
    assert error < 1.2 * their_error


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_have_the_names_of_checkpoints(name):
    known = grid_model(name)
    encoder = known.make_encoder()
    shapes = {key: value.shape for key, value in encoder.state_dict().items()}
    assert shapes == {key: value.shape for key, value in known.weights(encoder).items()}
    names = {key.removeprefix("model.") for key in known.model.state_dict()}
    rest = {key for key in names if not key.startswith(("language_model.", "lm_head."))}
    assert all(key.startswith(encoder.prefixes) for key in rest)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_padded_batch_of_one_size_has_one_shape(name):
    encoder, items = grid_model(name).make_encoder(), items_of(name)
    shapes = [
        {key: tuple(value.shape) for key, value in encoder.prepare(some, 1200).items()}
        for some in (items, items[:1], items[2:])
    ]
    assert shapes[0] == shapes[1] == shapes[2]


@pytest.mark.parametrize("name", FAMILIES)
def test_no_shape_follows_from_values(name):
    encoder, items = grid_model(name).make_encoder(), items_of(name)
    arguments = encoder.prepare(items, 1200)
    on_meta = {key: value.to("meta") for key, value in arguments.items()}
    assert encoder.to("meta").run(**on_meta).shape[0] == 1200 // encoder.sizes.block


@pytest.mark.parametrize("name", FAMILIES)
def test_a_simulated_card_gives_the_same(name):
    items, wanted = items_of(name), embeddings_of(name)
    encoder = grid_model(name).make_encoder()
    arguments = encoder.prepare(items, 1200)
    with simulated_hpu(PT_HPU_LAZY_MODE=1):
        encoder.to("hpu")
        found = encoder.run(**{key: value.to("hpu") for key, value in arguments.items()}).cpu()
    assert_near(encoder.split(found, items), wanted, 1e-5)


def test_windows_are_read_as_groups_are():
    generator = torch.Generator().manual_seed(1)
    sizes = [3, 8, 8, 1, 5, 8, 2]
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    for length in (35, 32, 11, 3):
        heads = torch.randn(3, length, 2, 4, generator=generator)
        wanted = attend_within(*heads, groups[:length])
        found = attend_within_windows(*heads, groups[:length], 8)
        torch.testing.assert_close(found, wanted)


def test_many_queries_are_read_in_parts(monkeypatch):
    heads = torch.randn(3, 20, 2, 4, generator=torch.Generator().manual_seed(1))
    groups = torch.arange(4).repeat_interleave(5)
    wanted = attend_within(*heads, groups)
    monkeypatch.setattr("vllm.model_executor.media.vision.packed_attention.MAX_QUERIES", 7)
    torch.testing.assert_close(attend_within(*heads, groups), wanted)


WRONG = [
    ("qwen2_vl", {"embed_dim": 62}, r"vision_config.embed_dim is 62; .* a multiple of 4 \* num_h"),
    ("qwen2_vl", {"depth": None}, "vision_config.depth is None; it must be an integer"),
    ("qwen2_vl", {"mlp_ratio": -1}, "vision_config.mlp_ratio is -1; it must be a positive number"),
    ("qwen2_5_vl", {"window_size": 13}, "window_size is 13; it must be an integer from 28"),
    ("qwen2_5_vl", {"fullatt_block_indexes": [3, 1]}, "a list of indices of layers, in ascending"),
    ("qwen3_vl", {"deepstack_visual_indexes": 3}, "a list of indices of layers, in ascending"),
    ("pixtral", {"hidden_size": 72}, r"hidden_size is 72; .* a multiple of 4 \* num_attention_h"),
    ("mistral3", {"model_type": "clip"}, "model_type is 'clip_vision_model'; it must be pixtral"),
    ("qwen2_5_vl", {"hidden_act": 5}, "hidden_act is 5; it must be the name of a function"),
    ("glm4v", {"attention_bias": 1}, "attention_bias is 1; it must be true or false"),
]


@pytest.mark.parametrize(("name", "values", "message"), WRONG)
def test_a_config_that_cannot_be_used_is_named(name, values, message):
    known = grid_model(name)
    vision = {**known.config["vision_config"], **values}
    with pytest.raises(ConfigError, match=message):
        known.encoder_class({**known.config, "vision_config": vision}, 48)
