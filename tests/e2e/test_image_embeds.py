"""Test image embeddings given instead of images: the same tokens, without the encoder."""

import base64
import io
import json
import struct

import numpy as np
import pytest

from tests.hpu import FEW_BUCKETS, simulated_hpu
from tests.reach import core_of, kept_encodings_of, media_of, runner_of, scheduler_of, worker_of
from tests.tiny_images import FAMILIES, draw_image, make_tiny_images
from vllm import LLM, SamplingParams
from vllm.errors import RequestError
from vllm.multimodal.job import family_of_model
from vllm.worker.parts.embedding_rows import EmbeddingRows

pytest.importorskip("PIL", reason="images need Pillow")
torch = pytest.importorskip("torch")

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ENGINE = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 60,
    "block_size": 16,
    "enable_mm_embeds": True,
}
WIDTH = 48
"""Elements of an embedding."""
IMAGES = [draw_image(1), draw_image(2, 100, 30)]


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return str(make_tiny_images("llava", tmp_path_factory.mktemp("llava")))


@pytest.fixture(scope="module")
def llm(llava):
    return LLM(llava, **ENGINE)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return str(make_tiny_images("qwen2_vl", tmp_path_factory.mktemp("qwen")))


def encoded(llm, image):
    """Return the embeddings that the encoder makes of an image, and the image's grid."""
    given = family_of_model(core_of(llm).config).process(image)
    tensors = {name: torch.from_numpy(array) for name, array in given.tensors.items()}
    with torch.inference_mode():
        (found,) = worker_of(llm).model.media_encoder([tensors])
    return found.clone().detach(), given.grid


def tokens_of(outputs):
    return [(list(each.prompt_token_ids), list(each.outputs[0].token_ids)) for each in outputs]


def ask(text, image, **others):
    return {"prompt": text, "multi_modal_data": {"image": image}, **others}


def num_encoded(llm):
    return runner_of(llm).stats().num_encoded_items


def base64_of(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


def in_lines(text):
    """Return base64 in lines and without padding, as MIME encoders and JWT libraries write it."""
    return base64.encodebytes(base64.b64decode(text)).decode().rstrip("=\n")


def header_of(dtype, shape):
    """Return the base64 of a safetensors file with a tensor that has no elements."""
    header = json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}}).encode()
    return base64.b64encode(struct.pack("<Q", len(header)) + header).decode()


@pytest.mark.parametrize("family", ["gemma3", "internvl", "qwen2_vl", "qwen3_vl", "qwen3_5"])
def test_embeddings_give_the_tokens_of_their_images(family, tmp_path):
    llm = LLM(str(make_tiny_images(family, tmp_path)), **ENGINE)
    text = FAMILIES[family].in_text
    text = f"First {text}, some words, then {text} and what?"
    embeddings, grids = zip(*(encoded(llm, image) for image in IMAGES), strict=True)
    given = {"image_embeds": list(embeddings)}
    if len(grids[0]) == 3:
        given["image_grid_thw"] = torch.tensor(grids)
    (output,) = found = llm.generate(ask(text, given), GREEDY)
    assert not num_encoded(llm)
    assert tokens_of(found) == tokens_of(llm.generate(ask(text, IMAGES), GREEDY))
    assert num_encoded(llm) == 2
    if family == "qwen3_vl":  # the prompt runs in chunks that end inside of images
        pieces = LLM(str(tmp_path), **ENGINE | {"max_num_batched_tokens": 8})
        assert tokens_of(pieces.generate(ask(text, given), GREEDY)) == tokens_of(found)
    assert len(output.prompt_token_ids) > 40
    assert len({grid[-2:] for grid in grids}) == (1 if family == "gemma3" else 2)


def test_every_form_of_embeddings_is_the_same_and_has_a_key_by_content(llm):
    (one, _), (two, _) = (encoded(llm, image) for image in IMAGES)
    text = "Look at this: <image> a"
    forms = [
        *(one, one[None], one.double(), one.numpy(), [one], [{"image_embeds": one}]),
        *({"image_embeds": form} for form in (one, one[None], in_lines(base64_of(one)))),
    ]
    for form in forms:
        (output,) = found = llm.generate(ask(text, form), GREEDY)
        assert tokens_of(found) == tokens_of(llm.generate(ask(text, IMAGES[0]), GREEDY))
    assert output.num_cached_tokens == 16
    (other,) = llm.generate(ask(text, two), GREEDY)
    assert other.num_cached_tokens == 0, "no other image has its blocks"
    both = torch.stack([one, two])
    want = tokens_of(llm.generate(ask("<image><image>", IMAGES), GREEDY))
    for form in (both, [one, two], [one, IMAGES[1]], {"image_embeds": both}):
        assert tokens_of(llm.generate(ask("<image><image>", form), GREEDY)) == want
    named = {"multi_modal_uuids": {"image": ["name"]}}
    tokens = [
        tokens_of(llm.generate(ask(text, image, **named), GREEDY)) for image in (IMAGES[1], one)
    ]
    assert tokens[0] != tokens[1], "a name of an image names no embeddings"
    # its last size equals the size of an embedding, but these are pixels
    pixels = np.moveaxis(IMAGES[0][:WIDTH, :WIDTH], -1, 0)
    image = tokens_of(llm.generate(ask(text, IMAGES[0][:WIDTH, :WIDTH]), GREEDY))
    assert tokens_of(llm.generate(ask(text, pixels), GREEDY)) == image
    half = one.bfloat16()
    assert tokens_of(llm.generate(ask(text, half), GREEDY)) == tokens_of(
        llm.generate(ask(text, half.float()), GREEDY)
    )


def test_embeddings_take_the_memory_of_the_dtype_of_the_model(llava):
    """The start reserves memory for stored embeddings in the dtype of the model; files may have
    another dtype.
    """
    llm = LLM(llava, **ENGINE | {"dtype": "bfloat16"})
    one = np.random.default_rng(0).standard_normal((16, WIDTH))
    two = torch.from_numpy(one).bfloat16()
    found = [llm.generate(ask("Look: <image> a", given), GREEDY) for given in (one, two)]
    assert tokens_of(found[0]) == tokens_of(found[1])
    kept = kept_encodings_of(media_of(llm, EmbeddingRows))
    assert {each.dtype for each in kept.values()} == {torch.bfloat16}


def test_a_chat_takes_embeddings(llm):
    one, _ = encoded(llm, IMAGES[0])
    text = {"type": "text", "text": "What?"}

    def chat(part):
        return tokens_of(llm.chat([{"role": "user", "content": [part, text]}], GREEDY))

    want = chat({"type": "image", "image": IMAGES[0]})
    forms = [one, base64_of(one), {"image_embeds": base64_of(one[None])}]
    for form in forms:
        assert chat({"type": "image_embeds", "image_embeds": form}) == want
    for form, message in (
        ("no!", r"messages\[0\].content\[0\]: image_embeds: is not base64"),
        (base64_of(one[:, 1:]), r"messages\[0\].content\[0\]: .*got \[16, 47\]"),
        (5, r"messages\[0\].content\[0\].image_embeds must be the base64 text .*got 5"),
        ({"a": 1}, r"messages\[0\].content\[0\]: .*must have the key 'image_embeds'.*got 'a'"),
    ):
        with pytest.raises(RequestError, match=message):
            chat({"type": "image_embeds", "image_embeds": form})


def test_on_a_simulated_card_embeddings_compile_nothing(qwen):
    host = LLM(qwen, **ENGINE | {"enable_mm_embeds": False})
    embeddings, grids = zip(*(encoded(host, image) for image in IMAGES), strict=True)
    given = {"image_embeds": torch.cat(embeddings), "image_grid_thw": torch.tensor(grids)}
    text = FAMILIES["qwen2_vl"].in_text * 2 + " some words, more than one piece of the prompt"
    with pytest.raises(RequestError, match="start it with --enable-mm-embeds"):
        host.generate(ask(text, given), GREEDY)
    with simulated_hpu(has_profiling_run=False, **FEW_BUCKETS | {"PT_HPU_LAZY_MODE": 1}) as bridge:
        llm = LLM(qwen, **ENGINE | {"max_num_batched_tokens": 32}, enforce_eager=True)
        compilations = bridge.counters().compilations
        want = tokens_of(llm.generate(ask(text, IMAGES), GREEDY))
        count = num_encoded(llm)
        assert tokens_of(llm.generate(ask(text, given), GREEDY)) == want
        assert num_encoded(llm) == count == 2
        assert bridge.counters().compilations == compilations


ONE = np.zeros((16, WIDTH), np.float32)


def with_value(value):
    wrong = ONE.copy()
    wrong[3, 5] = value
    return wrong


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (ONE[:15], "an image of this model must have 16 embeddings, got 15"),
        (
            {"image_embeds": ONE[:, :40]},
            r"must have the shape \[embeddings, 48\] .* got \[16, 40\]",
        ),
        ({"image_embeds": ONE[None, None]}, r"got \[1, 1, 16, 48\]"),
        ({"image_embeds": ONE[:0]}, r"got \[0, 48\]"),
        ({"image_embeds": with_value(np.nan)}, "NaN, infinite, or too large"),
        ({"image_embeds": with_value(-np.inf)}, "NaN, infinite, or too large"),
        ({"image_embeds": ONE.astype(int)}, "has dtype int64; accepted: float16"),
        ({"image_embeds": base64_of(torch.ones(16, 48).int())}, "unsupported dtype int32; it must"),
        ({"image_embeds": 5}, "must be a tensor or an array, got int"),
        ({"image_embeds": None}, "must have the key 'image_embeds'"),
        ({"image_embeds": ONE, "image_sizes": 1}, "may have 'image_grid_thw', got .*'image_sizes'"),
        (
            {"image_embeds": ONE, "image_grid_thw": [1, 8, 8]},
            "image_grid_thw is not used by this model",
        ),
        (
            {"image_embeds": ONE, "image_grid_thw": [1, 8]},
            "image_grid_thw must have three integers",
        ),
        ([ONE] * 17, "at most 16 images, got 17"),
        ([ONE, ONE], "got 1 placeholders and 2 images"),
    ],
)
def test_wrong_embeddings_are_refused_in_one_line(llm, given, message):
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate(ask("<image>", given), GREEDY)
    assert len(str(caught.value).splitlines()) == 1
    assert not scheduler_of(llm).media.holders


def test_embeddings_of_a_grid_need_the_grid(qwen):
    llm = LLM(qwen, **ENGINE)
    four = np.zeros((4, WIDTH), np.float32)
    for grid, message in (
        (None, "embeddings of an image for this model need image_grid_thw"),
        ([1, 4, 6], r"image_grid_thw \[1, 4, 6\] must have 6 embeddings, got 4"),
        ([1, 4, 5], "multiples of 2, got"),
        ([2, 4, 4], "image_grid_thw must be 1, height and"),
        ([1, -4, -4], "image_grid_thw must be 1, height and"),
        ([[1, 2, 4], [1, 2, 2]], "2 images of this image_grid_thw must have 3 embeddings"),
        ([[1, 2, 4], [0, 2, 2]], "must have 2 embeddings, each at least one, got 4"),
        ([1.0, 4.0, 4.0], "must have three integers for each image, got float"),
        ([10**30, 4, 4], "must have three integers for each image, got int"),
        (["a" * 2**20, *[""] * 2**10], "the file is neither"),
        (header_of("I64", [0, 2**62, 3]), "image_grid_thw must have the shape"),
        (header_of("I64", [0, *[1] * 100, 3]), "dimensions, got 102"),
        (np.array([1.0, 4.0, 4.0]), "has dtype float64; accepted: int32, int64"),
    ):
        given = {"image_embeds": four, "image_grid_thw": grid}
        with pytest.raises(RequestError, match=message) as caught:
            llm.generate(ask(FAMILIES["qwen2_vl"].in_text, given), GREEDY)
        assert len(str(caught.value).splitlines()) == 1
    text = FAMILIES["qwen2_vl"].in_text
    flat = {"image_embeds": four, "image_grid_thw": [[1, 2, 4], [1, 4, 2]]}
    (one,) = llm.generate(ask(text + text, flat), GREEDY)
    two = {
        "image_embeds": torch.zeros(2, 2, WIDTH),
        "image_grid_thw": torch.tensor([[1, 2, 4], [1, 4, 2]]),
    }
    assert tokens_of([one]) == tokens_of(llm.generate(ask(text + text, two), GREEDY))
