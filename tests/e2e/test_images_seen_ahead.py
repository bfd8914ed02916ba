"""Test images whose tokens see each other in both directions.

The engine gives the tokens and log-probabilities of transformers, however prompts are split and
whatever is cached.
"""

import numpy as np
import pytest
import torch
import transformers

from tests.e2e.test_images import ENGINE, GREEDY, images_of, requests_of, tokens_of
from tests.exhaustive import exhaustive
from tests.hpu import FEW_BUCKETS, simulated_hpu
from tests.reach import scheduler_of
from tests.tiny_images import draw_image, expected_outputs, make_tiny_images
from vllm import LLM, SamplingParams
from vllm.errors import ConfigError
from vllm.transformers_utils.transformers_version import is_version_4

pytest.importorskip("PIL", reason="images need Pillow")

NUM_TOKENS = 16
"""Number of tokens of an image."""
IMAGE = "<start_of_image>"
KINDS = ["sliding_attention", "full_attention"] * 2
# In transformers 4, image tokens also see image tokens outside of the window: use a window that is
# longer than an image.
WINDOW = 20 if is_version_4() else 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a model with two kinds of layers: with a window that is smaller than an
    image, and without a window.
    """
    return make_tiny_images(
        "gemma3",
        tmp_path_factory.mktemp("gemma3"),
        num_hidden_layers=4,
        layer_types=KINDS,
        sliding_window=WINDOW,
    )


@pytest.fixture(scope="module")
def expected(folder):
    """Return the outputs of `requests_of` from an engine without chunks and prefix cache, which the
    first test compares with transformers.
    """
    llm = LLM(str(folder), **ENGINE, enable_prefix_caching=False)
    return tokens_of(llm.generate(requests_of("gemma3"), GREEDY))


def ask(text, *images):
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


@torch.inference_mode()
def logprobs_of_transformers(folder, token_ids, images):
    """Return the log-probabilities of all tokens except the first one."""
    model_class = transformers.Gemma3ForConditionalGeneration
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    name = "Gemma3ImageProcessor" if is_version_4() else "Gemma3ImageProcessorPil"
    processor = getattr(transformers, name)(size={"height": 32, "width": 32})
    pixels = processor(images=images, return_tensors="pt", input_data_format="channels_last")
    ids = torch.tensor([token_ids])
    logits = model.eval()(
        input_ids=ids,
        pixel_values=pixels["pixel_values"],
        token_type_ids=(ids == model.config.image_token_id).int(),
        attention_mask=torch.ones_like(ids),
    ).logits
    found = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
    return found[:, 0].tolist()


def test_tokens_and_logprobs_are_those_of_transformers(folder, expected):
    # 23 is the smallest number that 8 requests allow.
    llm = LLM(str(folder), **ENGINE, max_num_batched_tokens=23)
    texts = [
        (f"{IMAGE}{IMAGE} Compare, one by one.", [1, 2]),
        (f"First {IMAGE}, then some words, then {IMAGE} and {IMAGE}", [3, 1, 3]),
    ]
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0, logprobs=0
    )
    prompts = [ask(text, *images_of(seeds)) for text, seeds in texts]
    for (_, seeds), output in zip(texts, llm.generate(prompts, params), strict=True):
        sample = output.outputs[0]
        token_ids = [*output.prompt_token_ids, *sample.token_ids]
        entries = [*output.prompt_logprobs[1:], *sample.logprobs]
        found = [entry[token].logprob for entry, token in zip(entries, token_ids[1:], strict=True)]
        want = logprobs_of_transformers(folder, token_ids, images_of(seeds))
        np.testing.assert_allclose(found, want, atol=1e-4, rtol=0)
    assert tokens_of(llm.generate(requests_of("gemma3"), GREEDY)) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
        {"max_num_batched_tokens": 40, "block_size": 4, "num_gpu_blocks_override": 480},
        {"enforce_eager": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"num_scheduler_steps": 4, "async_scheduling": False},
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_settings_of_the_engine_change_no_token(folder, expected, settings):
    llm = LLM(str(folder), **{**ENGINE, **settings})
    for _ in range(2):  # the second time with cached prefixes
        assert tokens_of(llm.generate(requests_of("gemma3"), GREEDY)) == expected
    if "tensor_parallel_size" not in settings:
        assert not scheduler_of(llm).media.holders


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preempted_requests_read_their_image_again(folder, enable_prefix_caching):
    prompts = [ask(f"{number} {IMAGE}?", draw_image(number)) for number in range(6)]
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    want = LLM(str(folder), **ENGINE).generate(prompts, params)
    llm = LLM(
        str(folder),
        **{**ENGINE, "max_model_len": 96, "block_size": 8, "num_gpu_blocks_override": 40},
        max_num_batched_tokens=30,
        enable_prefix_caching=enable_prefix_caching,
    )
    assert tokens_of(llm.generate(prompts, params)) == tokens_of(want)
    assert scheduler_of(llm).num_preemptions


def test_a_cached_prefix_may_end_at_any_block_of_an_image(tmp_path):
    """The other tokens of the image see its cached tokens and each other."""
    # Full attention: with windows a cached prefix needs blocks that are dropped early.
    kinds = ["full_attention"] * 2
    folder = str(make_tiny_images("gemma3", tmp_path, layer_types=kinds))
    size = {"block_size": 4, "num_gpu_blocks_override": 21, "max_model_len": 80}
    llm = LLM(folder, **{**ENGINE, **size, "max_num_seqs": 1, "max_num_batched_tokens": 16})
    plain = LLM(folder, **ENGINE, enable_prefix_caching=False)
    start, image = llm.get_tokenizer().convert_tokens_to_ids(IMAGE), draw_image(7)
    one, ends = SamplingParams(temperature=0, max_tokens=1), set()
    for num_before in range(4):
        prompt = ask("a" * (9 + num_before) + IMAGE + " and what?", image)
        (want,) = plain.generate(prompt, GREEDY, use_tqdm=False)
        first = want.prompt_token_ids.index(start) + 1
        for num_others in range(44, 76, 4):
            llm.generate(prompt, one, use_tqdm=False)
            # Other requests take blocks of the first prompt, the last blocks first.
            llm.generate("b" * num_others, one, use_tqdm=False)
            (found,) = llm.generate(prompt, GREEDY, use_tqdm=False)
            assert tokens_of([found]) == tokens_of([want])
            ends.add(found.num_cached_tokens - first)
            llm.reset_prefix_cache()
    assert set(range(1, NUM_TOKENS)) <= ends


def test_a_cached_prefix_of_windows_may_end_inside_of_an_image(folder, expected):
    llm = LLM(str(folder), **{**ENGINE, "block_size": 8, "num_gpu_blocks_override": 200})
    plain = LLM(str(folder), **ENGINE, enable_prefix_caching=False)
    ends = set()
    for num_before in range(8):
        prompt = ask("c" * (num_before + 1) + IMAGE, draw_image(3))
        found = [each.generate(prompt, GREEDY, use_tqdm=False)[0] for each in (plain, llm, llm)]
        assert len(set(map(tuple, tokens_of(found)))) == 1
        # the text after the image: its end token and two line breaks
        ends.add(len(found[2].prompt_token_ids) - 3 - found[2].num_cached_tokens)
    assert ends == set(range(-2, 6))


def test_line_breaks_around_images_are_joined_with_the_text(folder):
    """Line breaks are joined as the Processor of transformers does it, in texts and in tokens."""
    llm = LLM(str(folder), **ENGINE)
    tokenizer = llm.get_tokenizer()
    name = "Gemma3ImageProcessor" if is_version_4() else "Gemma3ImageProcessorPil"
    processor = transformers.Gemma3Processor(
        getattr(transformers, name)(size={"height": 32, "width": 32}),
        tokenizer,
        image_seq_length=NUM_TOKENS,
    )
    one = SamplingParams(max_tokens=1)
    for text in (
        *(f"a{IMAGE}b", f"a\n{IMAGE}\nb", f"a {IMAGE} b", IMAGE, f"\n\n{IMAGE}{IMAGE}\n"),
        *(f"{IMAGE}\n{IMAGE}\n\n", f"é{IMAGE}é\n", f"{IMAGE}a{IMAGE}\n\n\n{IMAGE}\n\n\n\nb"),
    ):
        images = [draw_image(n) for n in range(text.count(IMAGE))]
        want = processor(images=images, text=text, input_data_format="channels_last")
        (want_ids,) = want["input_ids"]
        (found,) = llm.generate(ask(text, *images), one, use_tqdm=False)
        assert (found.prompt, found.prompt_token_ids) == (text, want_ids)
        for token_ids in (tokenizer(text)["input_ids"], want_ids):
            prompt = {**ask(text, *images), "prompt_token_ids": token_ids}
            (found,) = llm.generate(prompt, one, use_tqdm=False)
            assert found.prompt_token_ids == want_ids
    content = [{"type": "image", "image": draw_image(1)}, {"type": "text", "text": "\nWhat?"}]
    (found,) = llm.chat([{"role": "user", "content": content}], one, use_tqdm=False)
    text = f"USER: {IMAGE}\nWhat?\nASSISTANT:"
    want = processor(images=[draw_image(1)], text=text, input_data_format="channels_last")
    assert found.prompt_token_ids == want["input_ids"][0]


def test_another_image_behind_the_same_text_shares_nothing_of_it(folder):
    llm = LLM(str(folder), **ENGINE, max_num_batched_tokens=30)
    prompts = [ask(f"Look at this, all of you: {IMAGE} then", draw_image(n)) for n in (1, 2, 1)]
    outputs = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    want = expected_outputs(
        folder,
        [
            (each.prompt_token_ids, [draw_image(n)])
            for n, each in zip((1, 2, 1), outputs, strict=True)
        ],
        GREEDY.max_tokens,
    )
    assert tokens_of(outputs) == want
    assert want[0] != want[1]
    assert [each.num_cached_tokens for each in outputs] == [0, 16, 48]


def test_steps_that_have_no_room_for_an_image_are_refused_at_the_start(folder):
    message = r"image.*16 tokens.*one step.*max_num_batched_tokens \(22\).*max_num_seqs: 8\).*to 23"
    with pytest.raises(ConfigError, match=message):
        LLM(str(folder), **ENGINE, max_num_batched_tokens=22)
    (output,) = LLM(
        str(folder), **ENGINE, max_num_batched_tokens=22, limit_mm_per_prompt={"image": 0}
    ).generate("No picture", GREEDY)
    assert len(output.outputs[0].token_ids) == GREEDY.max_tokens


@pytest.mark.parametrize(
    ("variables", "settings"),
    [
        pytest.param({"VLLM_MERGED_PREFILL": True}, {}, marks=pytest.mark.exhaustive),
        pytest.param({}, {"max_num_batched_tokens": 40}, marks=pytest.mark.exhaustive),
        ({"VLLM_MERGED_PREFILL": True}, {"max_num_batched_tokens": 40, "enforce_eager": True}),
        # Exhaustive: test_positions.py runs drafts with positions of images on a card.
        exhaustive({}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    ],
    ids=str,
)
def test_on_a_simulated_card_prompts_may_be_merged_and_divided(
    folder, expected, variables, settings
):
    with simulated_hpu(
        has_profiling_run=False, PT_HPU_LAZY_MODE=1, **{**FEW_BUCKETS, **variables}
    ) as bridge:
        llm = LLM(str(folder), **{**ENGINE, **settings})
        before = bridge.counters()
        for _ in range(2):
            assert tokens_of(llm.generate(requests_of("gemma3"), GREEDY)) == expected
        assert bridge.counters().compilations == before.compilations
