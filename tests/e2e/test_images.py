"""Images in prompts: tokens are those of transformers, whatever else happens in the batch."""

import pytest

from tests.reach import scheduler_of
from tests.tiny_images import draw_image, llava_reference, make_llava, make_tokenizer
from vllm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ENGINE = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "block_size": 16,
    "num_gpu_blocks_override": 120,
}
PROMPTS = [
    ("What is in <image> this picture?", [1]),
    ("<image><image> Compare.", [1, 2]),
    ("No picture at all.", []),
    ("First <image>, then some words, then <image>", [3, 1]),
    ("<image>", [4]),
]


def images_of(seeds):
    shapes = [(40, 48), (32, 32), (100, 30), (17, 90), (64, 64)]
    return [draw_image(seed, *shapes[seed % len(shapes)]) for seed in seeds]


def requests_of(prompts=PROMPTS):
    return [
        {"prompt": text, "multi_modal_data": {"image": images_of(seeds)}} for text, seeds in prompts
    ]


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return make_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def expected(llava):
    tokenizer = make_tokenizer("<image>")
    prompts = [(tokenizer(text)["input_ids"], images_of(seeds)) for text, seeds in PROMPTS]
    return llava_reference(llava, prompts, GREEDY.max_tokens)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 8},  # ends inside of images
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
        {
            "enable_prefix_caching": False,
            "max_model_len": 128,
            "num_gpu_blocks_override": 9,
        },  # preempts
        {"enforce_eager": True},
    ],
    ids=str,
)
def test_tokens_are_those_of_transformers(llava, expected, settings):
    llm = LLM(str(llava), **{**ENGINE, **settings})
    outputs = llm.generate(requests_of(), GREEDY)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    media = scheduler_of(llm).media
    assert not media.holders
    assert len(outputs[0].prompt_token_ids) == len(PROMPTS[0][0]) - len("<image>") + 16
