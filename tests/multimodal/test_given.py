"""Test images, sounds and videos that programs give as objects."""

import numpy as np
import pytest
import torch

from vllm.errors import RequestError
from vllm.multimodal.given import as_list, as_source

pillow = pytest.importorskip("PIL.Image", reason="images need Pillow")

FRAMES = np.arange(3 * 4 * 5 * 3, dtype=np.uint8).reshape(3, 4, 5, 3)
TONE = np.sin(np.arange(80) / 5).astype(np.float32) / 2


def source(modality, item, **fields):
    given = {"where": "here", "uuid": None, "overrides": {}, "sampling_rate": 16000}
    return as_source(modality, item, **{**given, "background": (255, 0, 0), **fields})


@pytest.mark.parametrize(
    ("item", "rate"),
    [
        (TONE, 16000),
        (TONE.tolist(), 16000),
        ((TONE, 8000), 8000),
        ((torch.from_numpy(TONE), 8000.0), 8000),
        (np.stack([TONE + 0.25, TONE - 0.25]), 16000),
        (np.stack([TONE, TONE], axis=1), 16000),
        (torch.from_numpy(TONE).double(), 16000),
        (np.rint(TONE * 2**15).astype(np.int16), 16000),
    ],
)
def test_sounds_become_samples_of_one_channel(item, rate):
    (one,) = as_list("audio", item)
    found = source("audio", one)
    assert (found.samples.dtype, found.sampling_rate) == (np.float32, rate)
    np.testing.assert_allclose(found.samples, TONE, atol=1e-4)


@pytest.mark.parametrize(
    ("item", "seconds"),
    [
        (FRAMES, [0, 0.5, 1]),
        (FRAMES.transpose(0, 3, 1, 2), [0, 0.5, 1]),
        (torch.from_numpy(FRAMES), [0, 0.5, 1]),
        (list(FRAMES), [0, 0.5, 1]),
        ([pillow.fromarray(each) for each in FRAMES], [0, 0.5, 1]),
        ((FRAMES, {"fps": 4}), [0, 0.25, 0.5]),
        ((list(FRAMES), {"fps": 1.0}), [0, 1, 2]),
    ],
)
def test_videos_become_frames_and_their_seconds(item, seconds):
    (one,) = as_list("video", item)
    found = source("video", one)
    np.testing.assert_array_equal(found.frames.pixels, FRAMES)
    assert found.frames.seconds.tolist() == seconds


def test_several_items_are_a_list():
    assert len(as_list("audio", [TONE, (TONE, 8000)])) == 2
    assert len(as_list("audio", [TONE.tolist(), TONE.tolist()])) == 2
    assert len(as_list("video", [FRAMES, FRAMES])) == 2
    assert len(as_list("video", [list(FRAMES), list(FRAMES)])) == 2
    for several in (list(FRAMES), FRAMES, torch.from_numpy(FRAMES.transpose(0, 3, 1, 2))):
        found = [source("image", each).pixels for each in as_list("image", several)]
        np.testing.assert_array_equal(found, FRAMES)


CLEAR = pillow.new("RGBA", (5, 4), (0, 0, 0, 0))


@pytest.mark.parametrize(("modality", "item"), [("image", CLEAR), ("video", [CLEAR] * 2)])
def test_clear_pixels_of_pillow_images_have_the_color_of_the_background(modality, item):
    found = source(modality, item, background=(1, 2, 3))
    pixels = found.pixels if modality == "image" else found.frames.pixels
    assert (pixels == (1, 2, 3)).all()


@pytest.mark.parametrize(
    ("modality", "item", "got"),
    [
        ("audio", np.zeros((2, 2, 2)), "ndarray [2, 2, 2] of float64"),
        ("audio", np.zeros(0, np.float32), "ndarray [0] of float32"),
        ("audio", np.full(3, np.nan), "ndarray [3] of float64 with NaN or infinite values"),
        ("audio", np.zeros(3, np.int64), "ndarray [3] of int64"),
        ("audio", np.zeros((40, 40)), "ndarray [40, 40] of float64"),
        ("audio", (TONE, 0), "(ndarray [80] of float32, 0)"),
        ("audio", "a.wav", "str"),
        ("video", FRAMES[0], "ndarray [4, 5, 3] of uint8"),
        ("video", [FRAMES[0], FRAMES[0][:2]], "list"),
        ("video", [], "list"),
        ("video", (FRAMES, {"fps": 0}), "{'fps': 0})"),
        ("video", FRAMES.astype(np.int32) - 1, "ndarray [3, 4, 5, 3] of int32"),
    ],
)
def test_other_objects_are_refused_in_one_sentence(modality, item, got):
    with pytest.raises(RequestError) as failure:
        source(modality, item)
    message = str(failure.value)
    assert message.startswith("here must be the bytes of a file, ") and message.endswith(got)
