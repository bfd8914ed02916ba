"""Images together with every other feature of requests, and what is refused."""

import io

import numpy as np
import pytest

from tests.reach import scheduler_of
from tests.tiny_images import draw_image, make_tiny_images
from vllm import LLM, SamplingParams
from vllm.errors import RequestError
from vllm.sampling_params import BeamSearchParams

pillow = pytest.importorskip("PIL.Image", reason="images need Pillow")
torch = pytest.importorskip("torch")

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ENGINE = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "block_size": 16,
    "num_gpu_blocks_override": 120,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_images("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), **ENGINE)


@pytest.fixture(scope="module")
def plain(folder):
    """Keeps nothing between requests."""
    return LLM(str(folder), **ENGINE, enable_prefix_caching=False)


def ask(text, *images, **others):
    return {"prompt": text, "multi_modal_data": {"image": list(images)}, **others}


def tokens_of(outputs):
    return [list(sample.token_ids) for output in outputs for sample in output.outputs]


IMAGE = draw_image(1, 32, 32)
FLOATS = np.full((8, 8, 3), 0.5)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (ask("<image>", np.full((8, 8, 3), np.nan)), r"must be an image .*got ndarray \[8, 8, 3\]"),
        (ask("<image>", FLOATS.astype(object)), r"must be an image .*of object"),
        (ask("<image>", FLOATS > 0), r"must be an image .*of bool"),
        (ask("<image>", np.zeros((0, 8, 3))), r"must be an image .*got ndarray \[0, 8, 3\]"),
        (ask("<image>", memoryview(b"1")), "must be an image .*got memoryview$"),
        (ask("<image>", "a.png"), "must be an image .*got str$"),
        (ask("<image>", torch.empty(3, 8, 8, device="meta")), r"got Tensor \[3, 8, 8\]"),
        (ask("<image>", torch.rand(3, 8, 8).to_sparse()), r"got Tensor \[3, 8, 8\]"),
        (ask("<image>", torch.zeros(1, 16, 48)), r"must be an image .*\[1, 16, 48\]"),
        (ask("<image><image>", IMAGE, b"no"), r"\['image'\]\[1\]: it is no image"),
        (ask("<image>", np.zeros((5000, 1, 3), np.uint8)), "1 x 5000 pixels"),
        (ask("<image>" * 17, *[IMAGE] * 17), "at most 16 images, got 17"),
        (ask("<image><image>", IMAGE), "it has 2, and 1 images are given"),
        (ask("none", IMAGE), "it has 0, and 1 images are given"),
        ({"prompt": "<image>", "multi_modal_data": IMAGE}, "must be a dict .*got ndarray"),
        ({"prompt": "<image>", "multi_modal_data": {"image_embeds": FLOATS}}, "'image_embeds'"),
        (ask("<image>" * 16, *[IMAGE] * 16), "prompt has 256 tokens"),
        (ask("<image>", IMAGE, multi_modal_uuids="a"), "multi_modal_uuids must be a dict.*str"),
        (ask("<image>", IMAGE, multi_modal_uuids={"video": ["a"]}), r"got \['video'\]"),
        *(
            (ask("<image>", IMAGE, multi_modal_uuids={"image": uuids}), "list of 1 non-empty")
            for uuids in (["a", "b"], [5], [""], 5)
        ),
        (ask("<image>", IMAGE, mm_processor_kwargs=[1]), "must be a dict .*got list"),
        (ask("<image>", IMAGE, mm_processor_kwargs={1: 2, "a": 3}), "keys are strings"),
        (ask("<image>", IMAGE, mm_processor_kwargs={"size": FLOATS}), "values of JSON"),
        (ask("<image>", IMAGE, mm_processor_kwargs={"no": 1}), "no setting 'no'"),
        *(
            (ask("<image>", IMAGE, mm_processor_kwargs={"size": {"shortest_edge": edge}}), "size")
            for edge in (100_000, 65)
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_prompt_is_refused_in_one_line(llm, prompt, message):
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate(prompt, GREEDY)
    assert len(str(caught.value).splitlines()) == 1
    assert not scheduler_of(llm).media.holders


def test_every_form_of_an_image_is_the_same(llm):
    file = io.BytesIO()
    pillow.fromarray(IMAGE).save(file, "PNG")
    pixels = torch.from_numpy(IMAGE)
    forms = [
        *(IMAGE, IMAGE.astype(np.int64), IMAGE / 255, IMAGE.transpose(2, 0, 1)),
        *(pillow.fromarray(IMAGE), file.getvalue(), pixels, pixels.permute(2, 0, 1) / 255),
        (pixels / 255).requires_grad_(),
    ]
    want, *others = tokens_of(llm.generate([ask("<image> a", form) for form in forms], GREEDY))
    assert all(tokens == want for tokens in others)
    half = torch.full((3, 8, 8), 0.5)
    first, second = tokens_of(
        llm.generate([ask("<image>", half.bfloat16()), ask("<image>", half)], GREEDY)
    )
    assert first == second


def test_beams_keep_the_images_and_the_salt_of_their_prompt(llm, plain):
    prompts = [ask("<image> a", IMAGE), {"prompt": "no <image>"}, ask("<image> b", draw_image(2))]
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    want = plain.generate(prompts, greedy)
    one = BeamSearchParams(beam_width=1, max_tokens=4, ignore_eos=True)
    for beams, output in zip(llm.beam_search(prompts, one), want, strict=True):
        expected = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        assert beams.sequences[0].tokens == expected
    wide = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
    first, salted = llm.beam_search([prompts[0], {**prompts[0], "cache_salt": "s"}], wide)
    assert [each.tokens for each in first.sequences] == [each.tokens for each in salted.sequences]
    assert llm.generate({**prompts[0], "cache_salt": "s"}, greedy)[0].num_cached_tokens


def test_beams_continue_the_positions_of_an_image(tmp_path):
    folder = make_tiny_images("qwen2_vl", tmp_path)
    llm = LLM(str(folder), **ENGINE)
    pad = "<|vision_start|><|image_pad|><|vision_end|>"
    for text in (f"{pad} what", f"x {pad}", "text <|image_pad|> alone"):
        prompt = ask(text, *[draw_image(3, 100, 30)] * ("start" in text))
        (output,) = llm.generate(prompt, GREEDY)
        params = BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True)
        (beams,) = llm.beam_search([prompt], params)
        expected = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        assert beams.sequences[0].tokens == expected
    (short,) = llm.generate(prompt, SamplingParams(max_tokens=2, truncate_prompt_tokens=5))
    assert len(short.prompt_token_ids) == 5
