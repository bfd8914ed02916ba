import json
from argparse import ArgumentParser
from io import BytesIO

import pytest
from PIL import Image

from vllm.assets import BUNDLED_MODEL
from vllm.entrypoints.bench.dataset_args import (
    DatasetArgs,
    add_dataset_flags,
    dataset_of,
    read_dataset_flags,
)
from vllm.entrypoints.bench.datasets import (
    file_requests,
    ordinary_ids,
    random_requests,
    random_texts,
    with_images,
)
from vllm.errors import ConfigError
from vllm.transformers_utils.tokenizer import get_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return get_tokenizer(str(BUNDLED_MODEL))


def dataset(name="random", **settings):
    return DatasetArgs(name=name, **{"num_prompts": 50, "input_len": 20, **settings})


# ---- random -------------------------------------------------------------------------------


def test_random_prompts_repeat_with_the_seed():
    first, again, other = (random_requests(dataset(seed=s), range(100)) for s in (1, 1, 2))
    assert first == again != other


def test_random_prompts_without_a_range_have_one_length():
    requests = random_requests(dataset(output_len=7), range(5, 10))
    assert {(len(r.prompt), r.num_prompt_tokens, r.max_tokens) for r in requests} == {(20, 20, 7)}
    assert {token_id for r in requests for token_id in r.prompt} == {5, 6, 7, 8, 9}


def test_random_lengths_fill_their_range():
    requests = random_requests(dataset(output_len=10, range_ratio=0.5, num_prompts=500), range(100))
    assert {len(r.prompt) for r in requests} == set(range(10, 31))
    assert {r.max_tokens for r in requests} == set(range(5, 16))


def test_a_prefix_is_shared_and_comes_on_top():
    requests = random_requests(dataset(prefix_len=8), range(1000))
    assert len({tuple(r.prompt[:8]) for r in requests}) == 1
    assert len({tuple(r.prompt[8:]) for r in requests}) == 50
    assert {r.num_prompt_tokens for r in requests} == {28}


@pytest.mark.parametrize("prefix_len", [0, 8])
def test_random_texts_have_the_wanted_number_of_tokens(tokenizer, prefix_len):
    requests = random_texts(dataset(prefix_len=prefix_len, range_ratio=0.5), tokenizer)
    for request in requests:
        ids = tokenizer(request.prompt, add_special_tokens=False)["input_ids"]
        assert len(ids) == request.num_prompt_tokens
        assert 10 + prefix_len <= len(ids) <= 30 + prefix_len
    assert len({r.prompt for r in requests}) == 50


def test_no_special_token_is_drawn(tokenizer):
    ids = ordinary_ids(tokenizer)
    assert not set(ids) & set(tokenizer.all_special_ids)
    assert len(ids) > 3000


# ---- files --------------------------------------------------------------------------------

SHAREGPT = [
    {"conversations": [{"from": "human", "value": "What is it?"}, {"value": "It is an answer."}]},
    {"conversations": [{"from": "human", "value": "No answer"}]},
    {"conversations": [{"value": ""}, {"value": "empty question"}]},
    {"id": "other"},
    "no object",
]


def write(tmp_path, text, name="prompts"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("path", "name"),
    [(None, "random"), ("a/b.json", "sharegpt"), ("b.jsonl", "jsonl"), ("b.txt", "text")],
)
def test_the_name_of_a_file_says_what_it_is(path, name):
    assert dataset_of(path) == name


def test_sharegpt_asks_the_first_question_for_an_answer_of_that_length(tmp_path, tokenizer):
    path = write(tmp_path, json.dumps(SHAREGPT))
    (request,) = file_requests(dataset("sharegpt", path=path, num_prompts=1), tokenizer)
    answer = tokenizer("It is an answer.", add_special_tokens=False)["input_ids"]
    assert (request.prompt, request.max_tokens) == ("What is it?", len(answer))
    assert request.num_prompt_tokens == len(tokenizer("What is it?").input_ids)


def test_jsonl_has_texts_or_ids_and_lengths(tmp_path):
    lines = '{"prompt": "a", "output_len": 3}\n\n{"prompt": [1, 2], "max_tokens": 4}\n'
    path = write(tmp_path, lines + '{"prompt": "c"}\n')
    requests = file_requests(dataset("jsonl", path=path, num_prompts=3), None)
    found = {str(r.prompt): (r.max_tokens, r.num_prompt_tokens) for r in requests}
    assert found == {"a": (3, None), "[1, 2]": (4, 2), "c": (128, None)}


def test_a_given_length_counts_more_than_the_file(tmp_path):
    path = write(tmp_path, '{"prompt": "a", "output_len": 3}')
    (request,) = file_requests(dataset("jsonl", path=path, num_prompts=1, output_len=9), None)
    assert request.max_tokens == 9


def test_text_is_a_prompt_per_line_and_starts_again_when_it_ends(tmp_path):
    path = write(tmp_path, "one\n\ntwo\n")
    requests = file_requests(dataset("text", path=path, num_prompts=5), None)
    prompts = [r.prompt for r in requests]
    assert set(prompts[:2]) == {"one", "two"}
    assert prompts == [*prompts[:2], *prompts[:2], prompts[0]]


def test_what_does_not_fit_the_model_is_left_out(tmp_path):
    path = write(tmp_path, '{"prompt": [1, 2, 3], "output_len": 8}\n{"prompt": [1]}')
    args = dataset("jsonl", path=path, num_prompts=2)
    assert [r.max_tokens for r in file_requests(args, None, max_model_len=11)] == [8, 8]
    with pytest.raises(
        ConfigError, match=r"none of the 2 requests in .* fits into the context length of the model"
    ):
        file_requests(args, None, max_model_len=10)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("sharegpt", "{", "is not JSON"),
        ("sharegpt", "{}", "contains no prompt in the format sharegpt"),
        ("text", "\n \n", "contains no prompt in the format text"),
        ("jsonl", '{"prompt": "a"}\n{', "line 2: not JSON"),
        ("jsonl", '{"prompt": ["a"]}', "line 1: 'prompt' must be a string or a list of token ids"),
        ("jsonl", '{"prompt": [true]}', "line 1: 'prompt' must be"),
        ("jsonl", '{"text": "a"}', "line 1: 'prompt' must be"),
        ("jsonl", '{"prompt": "a", "output_len": 0}', "line 1: 'output_len' must be a number abo"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path, name, text, message):
    with pytest.raises(ConfigError, match=message):
        file_requests(dataset(name, path=write(tmp_path, text)), None)


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"cannot read the dataset '/no/file\.txt'"):
        file_requests(dataset("text", path="/no/file.txt"), None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "sonnet"}, "dataset must be one of random, random-mm, sharegpt, jsonl, text"),
        ({"name": "text"}, "dataset text needs a file: give --dataset-path"),
        ({"range_ratio": 1.0}, "random_range_ratio must be at least 0 and below 1"),
        ({"num_prompts": 0}, "num_prompts must be at least 1, got 0"),
        ({"output_len": 0}, "output_len must be at least 1, got 0"),
        ({"prefix_len": -1}, "prefix_len must be at least 0, got -1"),
    ],
)
def test_a_dataset_checks_its_numbers(settings, message):
    with pytest.raises(ConfigError, match=message):
        dataset(**settings)


# ---- pictures -----------------------------------------------------------------------------


def with_flags(*flags, num_prompts=40):
    parser = ArgumentParser()
    add_dataset_flags(parser, input_len=4, num_prompts=num_prompts)
    args = parser.parse_args(["--dataset-name", "random-mm", *flags])
    args.seed = 1
    dataset = read_dataset_flags(args)
    return with_images(dataset, random_requests(dataset, range(100)))


def test_pictures_are_drawn_by_number_and_size():
    sizes = "{(40, 30, 1): 1, (16, 64, 1): 0.5, (720, 1280, 16): 0.0}"
    flags = ["--random-mm-bucket-config", sizes, "--random-mm-base-items-per-request", "2"]
    flags += ["--random-mm-num-mm-items-range-ratio", "1"]
    flags += ["--random-mm-limit-mm-per-prompt", '{"image": 3, "video": 0}']
    requests = with_flags(*flags)
    assert requests == with_flags(*flags)
    assert {len(r.images) for r in requests} == {0, 1, 2, 3}
    files = [file for r in requests for file in r.images]
    assert len(set(files)) == len(files)
    images = [Image.open(BytesIO(file)) for file in files]
    assert {image.size for image in images} == {(30, 40), (64, 16)}
    assert {image.format for image in images} == {"JPEG"}
    assert {len(r.prompt) for r in requests} == {4}


def test_pictures_have_usual_sizes_without_flags():
    images = [Image.open(BytesIO(r.images[0])) for r in with_flags(num_prompts=12)]
    assert {image.size for image in images} == {(256, 256), (1280, 720)}


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("base-items-per-request", "-1", "must be at least 0, got -1"),
        ("num-mm-items-range-ratio", "2", "must be from 0 to 1, got 2.0"),
        ("limit-mm-per-prompt", "3", "must be a JSON object such as"),
        ("limit-mm-per-prompt", '{"image": 0}', "must be at least 1, got 0"),
        ("limit-mm-per-prompt", '{"video": 2}', "'video' must be 0, got 2"),
        ("bucket-config", "{", "must be a dictionary such as"),
        ("bucket-config", "{(0, 9, 1): 1}", "heights, widths and weights above 0"),
        ("bucket-config", "{(9, 9): 1}", "must be a dictionary such as"),
        ("bucket-config", "{(9, 9, 1): 0}", "must be a dictionary such as"),
        ("bucket-config", "{(9, 9, 4): 1}", r"\(9, 9, 4\) is the size of a video"),
    ],
)
def test_a_flag_of_pictures_that_cannot_be_used_is_refused(flag, value, message):
    with pytest.raises(ConfigError, match=f"--random-mm-{flag}.*{message}"):
        with_flags(f"--random-mm-{flag}", value)
