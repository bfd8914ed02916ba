"""Test images that cross-attention layers read: the engine gives the tokens of transformers in
every batch and setting.

The table of families in test_images.py has the usual prompts.
"""

import base64
import io
import json

import pytest
from safetensors.torch import load_file, save_file

from tests.quantized_checkpoints import write as write_quantized
from tests.reach import scheduler_of, worker_of
from tests.tiny_images import draw_image, expected_outputs, make_tiny_images
from tests.tiny_models import make_tiny_model
from vllm import LLM, SamplingParams
from vllm.errors import RequestError
from vllm.model_executor.layers.cross_attention import cross_attention_layers

pillow = pytest.importorskip("PIL.Image", reason="images need Pillow")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ENGINE = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "block_size": 16,
    "num_gpu_blocks_override": 120,
}
IMAGE = "<|image|>"
SHAPES = [(40, 48), (32, 32), (100, 30), (17, 90), (64, 64), (20, 130), (130, 24)]
"""Height and width of images, which fill 1 to 4 tiles of 32 x 32 pixels in several layouts."""
PROMPTS = [
    (f"{IMAGE}What is it?", [0]),
    (f"The same {IMAGE} again, and again.", [0]),
    (f"The same {IMAGE} again, and again.", [4]),
    (f"{IMAGE}{IMAGE} Compare these two.", [1, 2]),
    ("No picture at all.", []),
    (f"One {IMAGE} then {IMAGE}{IMAGE} and at last {IMAGE}", [3, 5, 6, 0]),
    (f"{IMAGE} words between {IMAGE}", [2, 2]),
    (IMAGE, [5]),
    (f"{IMAGE}{IMAGE}{IMAGE}", [6, 0, 4]),
    ("Another text, which is a little longer than the others are.", []),
]


def image(number):
    return draw_image(number, *SHAPES[number])


def request(text, numbers, **others):
    return {
        "prompt": text,
        "multi_modal_data": {"image": [image(number) for number in numbers]},
        **others,
    }


REQUESTS = [request(*each) for each in PROMPTS]


def tokens_of(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_images("mllama", tmp_path_factory.mktemp("mllama"))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), **ENGINE)


@pytest.fixture(scope="module")
def expected(folder, llm):
    tokenizer = llm.get_tokenizer()
    prompts = [
        (tokenizer(text)["input_ids"], list(map(image, numbers))) for text, numbers in PROMPTS
    ]
    found = expected_outputs(folder, prompts, GREEDY.max_tokens)
    assert found[1] != found[2], "images make no difference"
    return found


def test_a_batch_of_texts_and_images_gives_the_tokens_of_transformers(llm, expected):
    outputs = llm.generate(REQUESTS, GREEDY)
    assert tokens_of(outputs) == expected
    image_id = llm.get_tokenizer().convert_tokens_to_ids(IMAGE)
    for output, (text, numbers) in zip(outputs, PROMPTS, strict=True):
        assert len(output.prompt_token_ids) == len(text.replace(IMAGE, "I"))
        assert output.prompt_token_ids.count(image_id) == len(numbers)
    # Generate again with cached prefixes and in another order.
    again = llm.generate(REQUESTS[::-1], GREEDY)[::-1]
    assert tokens_of(again) == expected
    assert any(output.num_cached_tokens for output in again)
    assert not scheduler_of(llm).media.holders


@pytest.mark.parametrize(
    "settings",
    [
        *({"max_num_batched_tokens": size, "max_num_seqs": 1} for size in (1, 2, 3)),
        {"max_num_batched_tokens": 9, "max_num_seqs": 4},
        # a cache of 7 blocks, so that requests are preempted
        {"enable_prefix_caching": False, "max_model_len": 80, "num_gpu_blocks_override": 7},
        {"enforce_eager": True},
    ],
    ids=str,
)
def test_wherever_a_prompt_is_cut_the_tokens_are_the_same(folder, expected, settings):
    llm = LLM(str(folder), **{**ENGINE, **settings})
    for _ in range(2):
        assert tokens_of(llm.generate(REQUESTS, GREEDY)) == expected
    assert not scheduler_of(llm).media.holders
    if "num_gpu_blocks_override" in settings:
        assert scheduler_of(llm).num_preemptions


def test_another_image_behind_a_cached_text_is_another_prompt(folder, llm):
    text = f"This text is longer than a block. {IMAGE} And this one is longer than a block too."
    ids = llm.get_tokenizer()(text)["input_ids"]
    wanted = expected_outputs(folder, [(ids, [image(n)]) for n in (0, 4)], GREEDY.max_tokens)
    assert wanted[0] != wanted[1]
    cached = []
    for number in (0, 4, 0):
        (output,) = llm.generate(request(text, [number]), GREEDY)
        assert tokens_of([output]) == [wanted[number // 4]]
        cached.append(output.num_cached_tokens)
    # Two blocks lie before the image. The third time, one image is in the encoder cache.
    assert cached == [0, 32, 64]


def test_sampling_parameters_are_the_same_in_pieces(folder, llm):
    pieces = LLM(str(folder), **{**ENGINE, "max_num_batched_tokens": 9, "max_num_seqs": 4})
    for sampling in (
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 2},
        {"bad_words": ["a"]},
    ):
        params = SamplingParams(temperature=0, max_tokens=6, **sampling)
        found, want = pieces.generate(REQUESTS, params), llm.generate(REQUESTS, params)
        assert tokens_of(found) == tokens_of(want)
        for one, other in zip(found, want, strict=True):
            for entries, others in zip(
                one.prompt_logprobs or (), other.prompt_logprobs or (), strict=True
            ):
                assert (entries or {}).keys() == (others or {}).keys()


def test_texts_and_ids_without_images(llm):
    tokenizer = llm.get_tokenizer()
    image_id = tokenizer.convert_tokens_to_ids(IMAGE)
    (output,) = llm.generate(f"It writes {IMAGE} as text", GREEDY)
    assert image_id not in output.prompt_token_ids
    assert tokenizer.decode(output.prompt_token_ids) == f"It writes {IMAGE} as text"
    with pytest.raises(RequestError, match="got 1 placeholders and 0 images"):
        llm.generate({"prompt_token_ids": [5, image_id]}, GREEDY)
    with pytest.raises(RequestError, match=f"token id {image_id + 8} at position 1"):
        llm.generate({"prompt_token_ids": [5, image_id + 8]}, GREEDY)
    with pytest.raises(RequestError, match="got 2 placeholders and 1 images"):
        llm.generate(request(f"{IMAGE} {IMAGE}", [0]), GREEDY)
    given = {"prompt_token_ids": [5, image_id, 6], "multi_modal_data": {"image": [image(0)]}}
    assert llm.generate(given, GREEDY)[0].prompt_token_ids == [5, image_id, 6]


@pytest.mark.parametrize("layout", ["before", "since"])
def test_both_layouts_of_checkpoints_read_images(folder, expected, layout, tmp_path):
    """In transformers 4.52, the parts of the model have moved to other names."""
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        rest = name.removeprefix("model.").removeprefix("language_model.")
        rest = rest.removeprefix("model.")
        is_text = not rest.startswith(("vision_model.", "multi_modal_projector."))
        is_head = rest.startswith("lm_head.")
        level = {
            "before": ("language_model.model.", "language_model.", ""),
            "since": ("model.language_model.", "", "model."),
        }
        of_text, of_head, of_images = level[layout]
        tensors[(of_head if is_head else of_text if is_text else of_images) + rest] = tensor
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(str(tmp_path), **ENGINE)
    assert tokens_of(llm.generate(REQUESTS, GREEDY)) == expected


def test_without_images_the_model_reads_text(folder, expected, tmp_path):
    texts = [index for index, (_, numbers) in enumerate(PROMPTS) if not numbers]
    llm = LLM(str(folder), **ENGINE, limit_mm_per_prompt={"image": 0})
    outputs = llm.generate([PROMPTS[index][0] for index in texts], GREEDY)
    assert tokens_of(outputs) == [expected[index] for index in texts]
    with pytest.raises(RequestError, match="reads text only"):
        llm.generate(REQUESTS[0], GREEDY)


@pytest.mark.parametrize("draft", ["the model", "a model of text"])
def test_drafts_of_models_change_no_token(folder, expected, draft, tmp_path):
    """A draft model that reads only text has no embedding for the token of an image."""
    other = folder
    if draft == "a model of text":
        vocab_size = json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"]
        other = make_tiny_model("llama", tmp_path, vocab_size=vocab_size)
        for file in folder.glob("tokenizer*"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    speculation = {"model": str(other), "num_speculative_tokens": 3}
    llm = LLM(str(folder), **ENGINE, speculative_config=speculation)
    assert tokens_of(llm.generate(REQUESTS, GREEDY)) == expected


@pytest.mark.parametrize("level", [1, 2])
def test_after_a_sleep_images_are_encoded_again(folder, expected, level):
    llm = LLM(str(folder), **ENGINE, enable_sleep_mode=True)
    pools = [layer.item_keys for layer in cross_attention_layers(worker_of(llm).model)]
    assert tokens_of(llm.generate(REQUESTS, GREEDY)) == expected
    assert all(pool.any() for pool in pools)
    llm.sleep(level=level)
    assert not any(pool.any() for pool in pools), "the memory of pools is released"
    llm.wake_up()
    if level == 2:
        llm.collective_rpc("reload_weights")
    assert tokens_of(llm.generate(REQUESTS, GREEDY)) == expected


@pytest.mark.parametrize("name", ["ct-fp8-dynamic", "ct-w8a16-int8"])
def test_a_quantized_language_model_reads_images(folder, name, tmp_path):
    """As in published checkpoints, the vision tower and the projector are not quantized."""
    skipped = ("vision_model", "multi_modal_projector")
    found = []
    for each in write_quantized(name, tmp_path, folder, skipped):
        for file in folder.iterdir():
            if not (each / file.name).exists():
                (each / file.name).write_bytes(file.read_bytes())
        found.append(tokens_of(LLM(str(each), **ENGINE).generate(REQUESTS, GREEDY)))
    assert found[0] == found[1]


def test_chats_give_images_to_the_model(folder, llm):
    data = io.BytesIO()
    pillow.fromarray(image(0)).save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    seen = {"type": "image_url", "image_url": {"url": url}}
    given = {"type": "image", "image": image(4)}
    question = {"type": "text", "text": f"what {IMAGE} is it?"}
    chats = [
        [{"role": "user", "content": [seen, question]}],
        [{"role": "user", "content": [seen, given, question]}],
        [{"role": "user", "content": [question]}],
        [
            {"role": "user", "content": [seen, question]},
            {"role": "assistant", "content": "a house"},
            {"role": "user", "content": [question, given]},
        ],
    ]
    outputs = llm.chat(chats, GREEDY)
    images = [[0], [0, 4], [], [0, 4]]
    prompts = [
        (list(output.prompt_token_ids), list(map(image, numbers)))
        for output, numbers in zip(outputs, images, strict=True)
    ]
    assert tokens_of(outputs) == expected_outputs(folder, prompts, GREEDY.max_tokens)
    token = llm.get_tokenizer().convert_tokens_to_ids(IMAGE)
    # The image token in the user's text is not an image.
    assert [ids.count(token) for ids, _ in prompts] == [1, 2, 0, 2]
