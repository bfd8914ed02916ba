"""Test videos as grids of patches: pixels, tokens, positions and embeddings.

The sizes of frames follow the rule that the video processors of transformers document. The test
cannot compare with these processors, because they need torchvision.
"""

import numpy as np
import pytest
import torch

from tests.multimodal.grid_models import grid_model, tensors_of
from tests.tiny_videos import draw_frames, expected_patches
from vllm.errors import ConfigError, RequestError
from vllm.multimodal.interface.family import PlacedItem, VideoFrames
from vllm.transformers_utils.transformers_version import is_version_4

pytest.importorskip("PIL", reason="images need Pillow")
pytest.importorskip("av", reason="videos need PyAV")

pytestmark = pytest.mark.skipif(
    is_version_4(), reason="this transformers has other configs for parts"
)

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v")
SIDES = {"qwen2_vl": 28, "qwen2_5_vl": 28, "qwen3_vl": 32, "qwen3_5": 32, "glm4v": 28}
IDS = {
    "<|image_pad|>": 7,
    "<|video_pad|>": 8,
    "<|vision_start|>": 9,
    "<|vision_end|>": 10,
    "<|image|>": 7,
    "<|begin_of_image|>": 9,
    "<|end_of_image|>": 10,
}


class Vocabulary:
    """A tokenizer with one token per character."""

    def __call__(self, token):
        return IDS[token]

    def text(self, text):
        return [100 + ord(each) for each in text]


def video(count, height, width, fps=2.0):
    frames = draw_frames(count, height=height, width=width)
    return VideoFrames(frames, np.arange(count) / fps)


def runs_of(expansion, start=0):
    """Return (index, length) of each series of embeddings in an expansion."""
    found = []
    for index, is_embedding in enumerate(expansion.is_embedding, start):
        if is_embedding and found and sum(found[-1]) == index:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        elif is_embedding:
            found.append((index, 1))
    return tuple(found)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_pairs_of_frames_become_patches_and_go_through_the_tower(name, count):
    known = grid_model(name)
    side = SIDES[name]
    # With this size, the limits of one frame and of a whole video change nothing.
    frames = video(count, 2 * side, 4 * side)
    given = known.make_family(
        size={"shortest_edge": side**2, "longest_edge": 16 * side**2},
        video_size={"shortest_edge": side**2, "longest_edge": 96 * side**2},
    ).process_video(frames)
    patches, grid = expected_patches(known.processor, frames.pixels)
    assert list(given.grid[:3]) == grid == given.tensors["grid"].tolist()
    assert len(given.grid) > 3
    tensors = tensors_of(given)
    mean, deviation = tensors["statistics"][:, :, None]
    scaled = (tensors["pixels"].unflatten(1, (3, -1)).float() - mean) / deviation
    torch.testing.assert_close(scaled.flatten(1), patches, rtol=0, atol=2e-6)
    wanted = known.model.model.get_video_features(patches, torch.tensor([grid]))
    wanted = torch.cat(tuple(getattr(wanted, "pooler_output", wanted)))
    encoder = known.make_encoder()
    (found,) = encoder.split(encoder.run(**encoder.prepare([tensors])), [tensors])
    torch.testing.assert_close(found[:, : wanted.shape[1]], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("qwen2_5_vl", (4, 100, 200), (112, 196)),
        ("qwen2_5_vl", (9, 100, 200), (112, 196)),
        ("qwen2_5_vl", (2, 480, 640), (252, 364)),
        ("qwen2_5_vl", (2, 33, 47), (56, 84)),
        ("qwen3_vl", (4, 100, 200), (96, 192)),
        ("qwen3_vl", (3, 100, 200), (96, 192)),
        ("qwen3_vl", (8, 480, 640), (96, 128)),
        ("qwen3_vl", (2, 20, 300), (32, 480)),
        ("qwen3_vl", (5, 33, 47), (32, 32)),
        ("glm4v", (4, 100, 200), (112, 196)),
        ("glm4v", (8, 480, 640), (84, 112)),
        ("glm4v", (2, 20, 300), (28, 420)),
    ],
)
def test_frames_have_the_documented_size(name, shape, expected):
    size = {"shortest_edge": 4096, "longest_edge": 100_000}
    family = grid_model(name).make_family(video_size=size)
    found = family.process_video(video(*shape))
    patch = SIDES[name] // 2
    assert (found.grid[1] * patch, found.grid[2] * patch) == expected
    largest = family.largest_of("video", shape[0])
    assert found.tensors["pixels"].nbytes <= largest.tensors["pixels"].nbytes


@pytest.mark.parametrize("name", FAMILIES)
def test_positions_are_those_of_the_model(name):
    known = grid_model(name)
    family = known.make_family(video_size={"shortest_edge": 1, "longest_edge": 2**20})
    side, vocabulary = SIDES[name], Vocabulary()
    # Positions in time are below the numbers of rows and columns. Otherwise the text after a video
    # continues at another position in transformers 5.
    film = family.process_video(video(5, 2 * side, 6 * side, fps=4.0))
    picture = family.process(draw_frames(1, height=3 * side, width=2 * side)[0])
    token_ids, kinds, items = [1, 1], [0, 0], []
    for given in (film, picture, film):
        expansion = family.expand(given.grid, vocabulary)
        start = len(token_ids)
        runs = runs_of(expansion, start)
        items.append(PlacedItem(start, len(expansion.token_ids), given.grid, runs))
        token_ids += [*expansion.token_ids, 1, 1, 1]
        kind = 1 if given is picture else 2
        kinds += [kind * is_embedding for is_embedding in expansion.is_embedding] + [0] * 3
    times = {}
    if name == "qwen2_5_vl":
        times = {"second_per_grid_ts": [0.5, 0.5]}
    wanted, delta = known.model.model.get_rope_index(
        torch.tensor([token_ids]),
        torch.tensor([kinds]),
        torch.tensor([picture.grid]),
        torch.tensor([film.grid[:3]] * 2),
        **times,
    )
    found = family.positions(len(token_ids), items)
    np.testing.assert_array_equal(found, wanted[:, 0].numpy())
    assert int(found.max()) + 1 - len(kinds) == int(delta)


@pytest.mark.parametrize(
    ("fps", "expected"), [(2.0, [0, 4, 8]), (1.0, [0, 8, 16]), (3.0, [0, 2, 5]), (12.0, [0, 0, 1])]
)
def test_positions_of_qwen2_5_vl_follow_the_seconds(fps, expected):
    family = grid_model("qwen2_5_vl").make_family()
    given = family.process_video(video(6, 28, 56, fps=fps))
    count = len(family.expand(given.grid, Vocabulary()).token_ids)
    each = count // 3
    found = family.positions(count + 2, [PlacedItem(1, count, given.grid, ((1, count),))])
    assert found[0, 1:-1:each].tolist() == [1 + step for step in expected]
    # As in the paper, the text continues after the largest position.
    assert found[:, -1].tolist() == [int(found[:, :-1].max()) + 1] * 3


def test_frames_of_qwen3_vl_have_their_seconds_as_text():
    family = grid_model("qwen3_vl").make_family()
    given = family.process_video(video(5, 64, 64, fps=0.3))
    expansion = family.expand(given.grid, Vocabulary())
    count = given.grid[1] * given.grid[2] // 4
    expected = []
    for stamp in ("<1.7 seconds>", "<8.3 seconds>", "<13.3 seconds>"):
        expected += [100 + ord(each) for each in stamp] + [9, *[8] * count, 10]
    assert expansion.token_ids == expected
    assert sum(expansion.is_embedding) == 3 * count
    embedded = np.array(expected)[np.array(expansion.is_embedding)]
    assert set(embedded.tolist()) == {8}


@pytest.mark.parametrize(
    ("processor", "stamps"),
    [
        (None, ("0", "6", "13")),
        ("Glm4vVideoProcessor", ("0", "6", "13")),
        ("Glm46VVideoProcessor", ("0.0 seconds", "6.7 seconds", "13.3 seconds")),
    ],
)
def test_frames_of_glm_are_images_and_have_their_seconds_after_them(processor, stamps):
    family = grid_model("glm4v").make_family(video_processor_type=processor)
    given = family.process_video(video(5, 56, 56, fps=0.3))
    expansion = family.expand(given.grid, Vocabulary())
    count = given.grid[1] * given.grid[2] // 4
    expected = []
    for stamp in stamps:
        expected += [9, *[7] * count, 10] + [100 + ord(each) for each in stamp]
    assert expansion.token_ids == expected
    embedded = np.array(expected)[np.array(expansion.is_embedding)]
    assert set(embedded.tolist()) == {7} and len(embedded) == 3 * count


def test_wrong_settings_and_frames_are_refused():
    known = grid_model("qwen3_vl")
    for size, message in (
        ({"longest_edge": 0}, "video_size.longest_edge is 0"),
        ({"height": 5}, "video_size.height is 5"),
        ([1, 2], "video_size is"),
        ({"shortest_edge": 9, "longest_edge": 8}, "at most longest_edge"),
    ):
        with pytest.raises(ConfigError, match=message):
            known.make_family(video_size=size)
    with pytest.raises(ConfigError, match="resample is 9"):
        known.make_family(resample=9).process_video(video(2, 64, 64))
    with pytest.raises(RequestError, match="one side may be at most 200 times the other"):
        known.make_family().process_video(video(2, 1, 300))
