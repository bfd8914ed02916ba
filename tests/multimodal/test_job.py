"""Test settings of the image processor that a request gives."""

from dataclasses import replace

import numpy as np
import pytest

from tests.multimodal.grid_models import grid_model
from vllm.errors import RequestError
from vllm.multimodal.images.settings import with_defaults
from vllm.multimodal.interface.family import VideoFrames
from vllm.multimodal.interface.source import MediaSource
from vllm.multimodal.job import family_class, make_job
from vllm.transformers_utils.transformers_version import is_version_4

pytest.importorskip("PIL", reason="images need Pillow")
pytestmark = pytest.mark.skipif(
    is_version_4(), reason="this transformers has other configs for parts"
)

BLOCK = 28 * 28
VIDEO = {"num_frames": 4, "fps": -1.0, "max_given": 8, "max_pixels": 10**6}
PIXELS = np.zeros((300, 300, 3), np.uint8)
TILE = {"image_size": 24, "patch_size": 8, "model_type": "clip_vision_model"}


def qwen2_vl():
    size = {"shortest_edge": 4 * BLOCK, "longest_edge": 40 * BLOCK}
    known = grid_model("qwen2_vl")
    return known.config, {**known.settings, "size": size}


def llava_next():
    settings = {
        "image_processor_type": "LlavaNextImageProcessor",
        "size": {"shortest_edge": 24},
        "crop_size": {"height": 24, "width": 24},
        "image_grid_pinpoints": [[24, 48], [48, 24]],
    }
    return {"vision_config": TILE}, settings


def read(family, made, **overrides):
    config, settings = made
    job = make_job(family, config, with_defaults(settings), 10**6, (255, 255, 255), 600, VIDEO)
    return job(MediaSource(modality="image", where="here", pixels=PIXELS, overrides=overrides))


@pytest.mark.parametrize(
    ("family", "made", "smaller", "larger"),
    [
        ("qwen2_vl", qwen2_vl(), {"max_pixels": 20 * BLOCK}, {"max_pixels": 60 * BLOCK}),
        (
            "qwen2_vl",
            qwen2_vl(),
            {"min_pixels": BLOCK},
            {"size": {"shortest_edge": 1, "longest_edge": 2**30}},
        ),
        (
            "llava_next",
            llava_next(),
            {"image_grid_pinpoints": [[24, 24]]},
            {"image_grid_pinpoints": [[24, 24], [72, 48]]},
        ),
    ],
)
def test_a_request_may_have_smaller_images_than_the_engine_and_no_larger_ones(
    family, made, smaller, larger
):
    usual = read(family, made)
    found = read(family, made, **smaller)
    assert found.tensors["pixels"].nbytes <= usual.tensors["pixels"].nbytes
    with pytest.raises(RequestError, match=r"an image could have \d+ .* of at most \d+"):
        read(family, made, **larger)


@pytest.mark.parametrize("edge", [49, 100_000])
def test_no_image_is_enlarged_to_be_cut(edge):
    with pytest.raises(RequestError, match="size is"):
        read("llava_next", llava_next(), size={"shortest_edge": edge})


def test_a_wrong_setting_of_a_request_is_its_fault():
    config, settings = qwen2_vl()
    job = make_job("qwen2_vl", config, with_defaults(settings), 10**6, (255, 255, 255), 600, VIDEO)
    frames = VideoFrames(np.stack([PIXELS] * 2), np.arange(2) / 2)
    source = MediaSource(modality="video", where="here", frames=frames, overrides={"resample": 99})
    message = "^mm_processor_kwargs: resample is 99; it must be one of"
    with pytest.raises(RequestError, match=message) as failure:
        job(source)
    assert failure.value.param == "mm_processor_kwargs"
    source = replace(source, overrides={"nothing": 1})
    message = "^mm_processor_kwargs: Qwen2VLImageProcessor has no setting 'nothing'"
    with pytest.raises(RequestError, match=message):
        job(source)


def test_settings_that_need_more_memory_than_there_is_are_blamed(monkeypatch):
    config, settings = qwen2_vl()
    job = make_job("qwen2_vl", config, with_defaults(settings), 10**6, (255, 255, 255), 1.0, VIDEO)

    def refuse(*_):
        raise MemoryError

    monkeypatch.setattr(family_class("qwen2_vl"), "largest_of", refuse)
    overrides = {"max_pixels": 100 * BLOCK}
    source = MediaSource(modality="image", where="it", pixels=PIXELS, overrides=overrides)
    with pytest.raises(RequestError, match=r"mm_processor_kwargs: .* more memory than there is"):
        job(source)
