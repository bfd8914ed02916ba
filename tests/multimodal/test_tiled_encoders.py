"""Test encoders of tiles of one size against transformers."""

from copy import deepcopy
from functools import cache

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import SiglipVisionConfig, SiglipVisionModel

from tests.multimodal.tiled_models import (
    LLAMA,
    PINPOINTS,
    SIDE,
    TEXT,
    TOWER,
    make_encoder,
    make_items,
    make_model,
    normalised,
)
from tests.reach import replace_ops
from vllm.errors import ConfigError
from vllm.model_executor.media.vision.layers import PatchEmbedding, TowerLinear
from vllm.model_executor.quantization.formats.cpu_packed import CPUPacked
from vllm.model_executor.quantization.interface import Quantization
from vllm.multimodal.families.llava_next import Family
from vllm.multimodal.families.mllama import read_layouts
from vllm.multimodal.images.settings import with_defaults
from vllm.ops.cpu.library import load_cpu_kernels
from vllm.ops.native.operators import NativeOps
from vllm.transformers_utils.transformers_version import is_version_4


def llava(kind="clip_vision_model", vision=None, **config):
    return make_model(
        "Llava",
        vision_config={"model_type": kind, **TOWER, **(vision or {})},
        text_config=LLAMA,
        **config,
    )


def llava_next(kind="clip_vision_model", **config):
    return make_model(
        "LlavaNext",
        vision_config={"model_type": kind, **TOWER},
        text_config=LLAMA,
        image_grid_pinpoints=PINPOINTS,
        **config,
    )


def gemma3():
    return make_model(
        "Gemma3",
        vision_config={"model_type": "siglip_vision_model", **TOWER},
        text_config=TEXT,
        mm_tokens_per_image=4,
    )


def idefics3(name="Idefics3"):
    kind = f"{name.lower()}_vision"
    return make_model(
        name, vision_config={"model_type": kind, **TOWER}, text_config=LLAMA, scale_factor=2
    )


def internvl(vision=None, **config):
    square = {"image_size": [28, 28], "patch_size": [7, 7]}
    return make_model(
        "InternVL",
        vision_config={**TOWER, **square, **(vision or {})},
        text_config=LLAMA,
        **config,
    )


def mllama(**vision):
    kind = {"attention_heads": TOWER["num_attention_heads"], "num_global_layers": 2}
    several = {"intermediate_layers_indices": [0, 2], "vision_output_dim": 96}
    return make_model(
        "Mllama",
        vision_config={**TOWER, **kind, **several, **vision},
        text_config={
            **TEXT,
            "num_hidden_layers": 2,
            "cross_attention_layers": [1],
            "bos_token_id": 1,
            "eos_token_id": 2,
            **({"rope_scaling": {"rope_type": "default"}} if is_version_4() else {}),
        },
        image_token_index=TEXT["vocab_size"],
    )


def mllama_items():
    """Return an image of each layout of tiles."""
    layouts = read_layouts({})
    return make_items(
        [rows * columns for rows, columns in layouts],
        layout=[torch.tensor([1 + index]) for index in range(len(layouts))],
    )


def llava_next_items():
    """Return images of many shapes, one of which has more padding than patches."""
    settings = {"image_processor_type": "LlavaNextImageProcessor", "crop_size": SIDE}
    settings |= {"image_grid_pinpoints": PINPOINTS}
    config = {"vision_config": {"model_type": "clip_vision_model", **TOWER}}
    family = Family(config, with_defaults(settings))
    sizes = [(161, 184), (20, 20), (30, 200), (90, 12)]
    layouts = [family.layout_of(*size) for size in sizes]
    assert len(set(layouts)) == len(sizes)
    return make_items(
        [layout.num_tiles for layout in layouts],
        layout=[torch.tensor(layout) for layout in layouts],
        size=[torch.tensor(size) for size in sizes],
    )


@cache
def normalises_last_state() -> bool:
    """Return whether the last hidden state of SigLIP is not the output of its last layer, as in
    transformers 4.57. Checkpoints were trained with the output.
    """
    tower = SiglipVisionModel(SiglipVisionConfig(**TOWER))
    output = tower(torch.zeros(1, 3, SIDE, SIDE), output_hidden_states=True)
    return torch.equal(output.hidden_states[-1], output.last_hidden_state)


def features_of(model, items):
    """Return the embeddings of each image."""
    name = type(model).__name__
    if is_version_4() and not hasattr(model, "model"):
        pytest.skip("this transformers has other modules around its towers")
    if is_version_4() and name.startswith(("Idefics3", "SmolVLM")):
        pytest.skip("this transformers rounds positions of patches to the ones before")
    is_last = getattr(model.config, "vision_feature_layer", -1) == -1
    if is_version_4() and name.startswith("InternVL") and not is_last:
        pytest.skip("this transformers ends in an error for other layers than the last")
    vision, layers = model.config.vision_config, getattr(model.config, "vision_feature_layer", -1)
    is_last = -1 in (layers if isinstance(layers, list) else [layers])
    if vision.model_type == "siglip_vision_model" and is_last and normalises_last_state():
        pytest.skip("this transformers returns the normalised output of the last layer of SigLIP")
    found = []
    if name.startswith("Mllama"):
        return [states_of_mllama(model, item) for item in items]
    for item in items:
        pixels = normalised(item).to(model.dtype)
        if hasattr(model.model, "connector"):
            pixels = pixels[None]
        sizes = {"image_sizes": item["size"][None]} if "size" in item else {}
        features = model.get_image_features(pixels, **sizes)
        features = getattr(features, "pooler_output", features)
        found.append(torch.cat([each.flatten(0, -2) for each in features]))
    return found


def states_of_mllama(model, item):
    """Return the hidden states of the tiles that an image fills; the text sees no others."""
    num_tiles = len(item["pixels"])
    tiles = torch.zeros(1, 1, 4, 3, SIDE, SIDE, dtype=model.dtype)
    tiles[0, 0, :num_tiles] = normalised(item)
    is_filled = (torch.arange(4) < num_tiles).long()[None, None]
    tower = model.model.vision_model
    hidden = tower(tiles, item["layout"][None], is_filled).last_hidden_state
    return model.model.multi_modal_projector(hidden)[0, 0, :num_tiles].flatten(0, 1)


FAMILIES = {
    "LLaVA": ("llava", llava, {}),
    "LLaVA, all tokens of the last layer": (
        "llava",
        llava,
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "LLaVA, several layers, no bias": (
        "llava",
        llava,
        {"vision_feature_layer": [1, -2], "multimodal_projector_bias": False},
    ),
    "LLaVA, SigLIP, relu": (
        "llava",
        llava,
        {
            "kind": "siglip_vision_model",
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": -1,
            "projector_hidden_act": "relu",
        },
    ),
    "LLaVA, sides that are no multiple of a patch": (
        "llava",
        llava,
        {"vision": {"patch_size": 8}},
    ),
    "InternVL": ("internvl", internvl, {}),
    "InternVL, RMS norm": (
        "internvl",
        internvl,
        {
            "vision": {
                "norm_type": "rms_norm",
                "use_qk_norm": True,
                "attention_bias": True,
                "use_mean_pooling": False,
                "use_mask_token": True,
            },
            "downsample_ratio": 0.25,
            "projector_hidden_act": "silu",
        },
    ),
    "InternVL, not the last layer": (
        "internvl",
        internvl,
        {"vision": {"use_mean_pooling": False}, "vision_feature_layer": -2},
    ),
    "Idefics3": ("idefics3", idefics3, {}),
    "SmolVLM": ("idefics3", idefics3, {"name": "SmolVLM"}),
    "Gemma 3": ("gemma3", gemma3, {}),
    "Llama 3.2 Vision": ("mllama", mllama, {}),
    "Llama 3.2 Vision, one layer, quick_gelu": (
        "mllama",
        mllama,
        {"intermediate_layers_indices": [1], "vision_output_dim": 64, "hidden_act": "quick_gelu"},
    ),
    "LLaVA-NeXT": ("llava_next", llava_next, {}),
    "Granite Vision": (
        "llava_next",
        llava_next,
        {
            "kind": "siglip_vision_model",
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": [-3, -1],
        },
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    """Return the family, the model of transformers, the encoder and images."""
    family, make, options = FAMILIES[request.param]
    model = make(**options)
    tiles = [3, 1, 5] if family in ("idefics3", "internvl") else [1, 1, 1]
    special = {"llava_next": llava_next_items, "mllama": mllama_items}
    items = special[family]() if family in special else make_items(tiles)
    return family, model, make_encoder(family, model), items


@torch.inference_mode()
def test_embeddings_are_those_of_transformers(case):
    _, model, encoder, items = case
    got, want = encoder(items), features_of(model, items)
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        assert theirs.std() > 0.1
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_neither_padding_nor_other_images_change_embeddings(case):
    _, _, encoder, items = case
    together = encoder(items)
    divided = [encoder.divide(item) for item in items]
    parts = [part for own in divided for part in own]
    size = sum(encoder.size_of(part) for part in parts)
    padded = encoder.prepare(parts, size + 2)
    assert {len(tensor) for name, tensor in padded.items() if name == "pixels"} == {size + 2}
    whole = encoder.run(**padded)
    assert whole.isfinite().all()
    found = iter(encoder.split(whole, parts))
    for item, own, expected in zip(items, divided, together, strict=True):
        torch.testing.assert_close(encoder.join([next(found) for _ in own], item), expected)
        # One part at a time, as in different steps.
        alone = [encoder.encode_parts([part])[0] for part in own]
        torch.testing.assert_close(encoder.join(alone, item), expected)


def test_shapes_do_not_depend_on_values(case, monkeypatch):
    _, _, encoder, items = case
    # CPU kernels read values, which fake tensors do not have.
    replace_ops(monkeypatch, NativeOps())
    size = sum(encoder.size_of(item) for item in items)
    tensors = encoder.prepare(items, size + 1)
    assert {name: t.shape for name, t in encoder.prepare(items[::-1], size + 1).items()} == {
        name: t.shape for name, t in tensors.items()
    }
    # These tensors have no values: an operator that needs values raises an error.
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        without = {name: mode.from_tensor(tensor) for name, tensor in tensors.items()}
        assert encoder.run(**without).shape[1] == TEXT["hidden_size"]


@torch.inference_mode()
def test_rounding_is_no_worse_than_that_of_transformers(case):
    family, model, _, items = case
    want = torch.cat(features_of(model, items))
    rounded = make_encoder(family, model, dtype=torch.bfloat16)
    ours = torch.cat(rounded(items))
    assert ours.dtype == torch.bfloat16
    theirs = torch.cat(features_of(deepcopy(model).bfloat16(), items))
    assert (ours - want).abs().mean() < 1.2 * (theirs - want).abs().mean()


@pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")
@torch.inference_mode()
def test_packed_weights_round_no_worse_than_dense_ones():
    model, items = llava(vision={"hidden_size": 64, "intermediate_size": 128}), make_items([1, 1])
    want = torch.cat(features_of(model, items))
    encoder = make_encoder("llava", model, dtype=torch.bfloat16)
    dense = torch.cat(encoder(items))
    layers = [layer for layer in encoder.modules() if isinstance(layer, TowerLinear)]
    for layer in layers:
        weight = layer.weight.data
        assert Quantization().method_of("", layer) is None
        layer.use_method(CPUPacked().method_of("", layer))
        layer.weight.data = weight
        layer.finish()
    assert any(layer.method.packed is not None for layer in layers)
    packed = torch.cat(encoder(items))
    assert (packed - want).abs().mean() < 1.2 * (dense - want).abs().mean()


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix("model."),
        lambda name: name.replace("vision_tower.", "vision_tower.vision_model."),
        lambda name: name.replace("model.vision_tower.", "vision_tower.vision_model."),
    ],
)
def test_names_of_all_releases_of_transformers(rename):
    if is_version_4():
        pytest.skip("the names here are those of version 5")
    model = llava()
    encoder = make_encoder("llava", model, rename)
    assert len(encoder.vision_tower.encoder.layers) == TOWER["num_hidden_layers"] - 1
    items = make_items([1])
    with torch.inference_mode():
        torch.testing.assert_close(encoder(items)[0], features_of(model, items)[0])


def test_patches_are_those_of_a_convolution():
    torch.manual_seed(0)
    convolution = torch.nn.Conv2d(3, 5, 4, stride=4)
    patches = PatchEmbedding(5, 4)
    patches.load_state_dict(convolution.state_dict())
    pixels = torch.randn(2, 3, 13, 10)
    want = convolution(pixels).flatten(2).transpose(1, 2)
    torch.testing.assert_close(patches(pixels), want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_feature_select_strategy": "full"}, "strategy is 'full'; it must be 'default'"),
        ({"vision_feature_layer": [1]}, r"vision_feature_layer is \[1\].*from -4 to 3"),
        ({"vision_config": TOWER | {"norm_type": "batch"}}, "norm_type is 'batch'"),
        (
            {"vision_config": TOWER | {"use_absolute_position_embeddings": False}},
            "use_absolute_position_embeddings is False; it must be true",
        ),
    ],
)
def test_values_that_the_encoder_of_internvl_cannot_use(change, message):
    from vllm.model_executor.media.families.internvl import Encoder

    with pytest.raises(ConfigError, match=message):
        Encoder({"vision_config": TOWER, **change}, 24)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_output_dim": 90}, r"vision_output_dim is 90; .*hidden_size times .*\(96\)"),
        ({"intermediate_layers_indices": [0, 3]}, r"indices is \[0, 3\]; .*of the 3 layers"),
        ({"intermediate_layers_indices": []}, r"indices is \[\]; .*of the 3 layers"),
        ({"intermediate_layers_indices": 3}, "indices is 3; .*in ascending order"),
        ({"num_global_layers": 0}, "num_global_layers is 0; it must be an integer from 1"),
        ({"max_num_tiles": -1}, "max_num_tiles is -1; it must be an integer from 1 to 16"),
        ({"supported_aspect_ratios": [[1, 1], 2]}, r"ratios is .*\[\[1, 1\], \[1, 2\]"),
        ({"attention_heads": 5}, r"hidden_size is 32.*multiple of attention_heads \(5\)"),
        ({"norm_eps": 0}, "norm_eps is 0; it must be a positive number"),
    ],
)
def test_values_that_the_encoder_of_llama_cannot_use(change, message):
    from vllm.model_executor.media.families.mllama import Encoder

    usual = {"intermediate_layers_indices": [0, 2], "vision_output_dim": 96}
    with pytest.raises(ConfigError, match=message):
        Encoder({"vision_config": {**TOWER, "attention_heads": 4, **usual, **change}}, 24)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"projector_hidden_act": 3}, "projector_hidden_act is 3"),
        ({"projector_hidden_act": "tan"}, "'tan' is not supported"),
        ({"multimodal_projector_bias": "no"}, "multimodal_projector_bias is 'no'"),
        ({"vision_feature_layer": -9}, "vision_feature_layer is -9.*the tower has 3 layers"),
    ],
)
def test_values_that_an_encoder_cannot_use(change, message):
    from vllm.model_executor.media.families.llava import Encoder

    config = {"vision_config": {"model_type": "clip_vision_model", **TOWER}, **change}
    with pytest.raises(ConfigError, match=message):
        Encoder(config, 24)
