"""Test requests to pooling models: lengths, pairs, dimensions, and which models accept them."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.engine.fakes import make_config
from tests.tiny_pooling_models import add_tokenizer
from vllm.config import PoolerConfig
from vllm.engine.input.input_processor import InputProcessor
from vllm.errors import RequestError
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

EMBED = PoolerConfig(task="embed", pooling_type="CLS", is_causal=False)
WORDS = " ".join(f"w{i}" for i in range(10, 110))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    return AutoTokenizer.from_pretrained(add_tokenizer(tmp_path_factory.mktemp("words")))


def make(tokenizer: Any, pooler: PoolerConfig | None = EMBED, num_types: int = 2) -> InputProcessor:
    config = make_config(64)
    arch = config.model.resolved_arch
    arch = replace(arch, hf_config={**arch.hf_config, "type_vocab_size": num_types})
    config = replace(config, model=replace(config.model, pooler=pooler, arch=arch))
    return InputProcessor(config, tokenizer, {})


def ids_of(processor: InputProcessor, prompt: Any, **params: Any) -> list[int]:
    _, request = processor.pooling.process("a", prompt, PoolingParams(**params))
    assert request.max_total_tokens == len(request.prompt_token_ids) + 1
    return request.prompt_token_ids


def test_a_text_has_its_special_tokens(tokenizer):
    processor = make(tokenizer)
    assert ids_of(processor, "w7 w8") == [2, 7, 8, 3]
    assert ids_of(processor, {"prompt": "w7 w8", "add_special_tokens": False}) == [7, 8]
    assert ids_of(processor, "") == ids_of(processor, "", truncate_prompt_tokens=2) == [2, 3]


@pytest.mark.parametrize("most", [3, 10, 63])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_text_is_cut_as_its_tokenizer_would(most, side, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "truncation_side", side)
    want = tokenizer(WORDS, truncation=True, max_length=most)["input_ids"]
    assert len(want) == most
    assert ids_of(make(tokenizer), WORDS, truncate_prompt_tokens=most) == want


@pytest.mark.parametrize(("first", "second"), [(3, 100), (100, 3), (40, 60), (50, 50)])
@pytest.mark.parametrize("most", [10, 11, 64])
def test_a_pair_is_cut_as_its_tokenizer_would(first, second, most, tokenizer):
    texts = [" ".join(WORDS.split()[:count]) for count in (first, second)]
    want = tokenizer(*texts, truncation=True, max_length=most)
    prompt = make(tokenizer).pooling.tokenize_pair(*texts, most)
    assert prompt["prompt_token_ids"] == want["input_ids"]
    assert prompt["token_type_ids"] == want["token_type_ids"]


def test_types_are_only_for_models_that_have_them(tokenizer):
    assert "token_type_ids" not in make(tokenizer, num_types=1).pooling.tokenize_pair("w7", "w8")


def test_token_ids_keep_their_end(tokenizer):
    assert ids_of(make(tokenizer), [5, 6, 7], truncate_prompt_tokens=2) == [6, 7]


def test_minus_one_is_as_long_as_the_model_takes(tokenizer):
    assert len(ids_of(make(tokenizer), WORDS, truncate_prompt_tokens=-1)) == 64


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (WORDS, {}, "maximum context length is 64 tokens.*has 102 tokens"),
        (WORDS, {"truncate_prompt_tokens": 2}, "must be more than the 2 special tokens"),
        (WORDS, {"truncate_prompt_tokens": 65}, "must be at most max_model_len \\(64\\)"),
        ({"prompt": "", "add_special_tokens": False}, {}, "prompt is empty, and no special"),
        ([], {}, "no tokens"),
        ("w7", {"dimensions": 8}, "embeddings of this model cannot be shortened"),
        (
            {"prompt_token_ids": [5, 6], "token_type_ids": [0]},
            {},
            "each of the 2 tokens of the prompt, got 1",
        ),
        ({"prompt_token_ids": [5], "token_type_ids": [2]}, {}, "integers from 0 to 1"),
        ({"prompt_token_ids": [5], "token_type_ids": "a"}, {}, "integers from 0 to 1"),
    ],
)
def test_what_is_wrong_is_told(prompt, params, message, tokenizer):
    with pytest.raises(RequestError, match=message):
        ids_of(make(tokenizer), prompt, **params)


@pytest.mark.parametrize(
    ("sizes", "dimensions", "message"),
    [((), 64, None), ((), 10**5, "at most"), ((8, 32), 32, None), ((8, 32), 16, "8, 32, got 16")],
)
def test_dimensions_are_those_of_the_model(sizes, dimensions, message, tokenizer):
    pooler = replace(EMBED, is_matryoshka=True, matryoshka_dimensions=sizes)
    processor = make(tokenizer, pooler)
    if message is None:
        _, request = processor.pooling.process("a", "w7", PoolingParams(dimensions=dimensions))
        assert request.pooling_params == PoolingParams(dimensions=dimensions)
    else:
        with pytest.raises(RequestError, match=message):
            ids_of(processor, "w7", dimensions=dimensions)


def test_the_wrong_kind_of_model_is_told_with_advice(tokenizer):
    with pytest.raises(RequestError, match=r"does not generate.*task 'embed'.*LLM\.embed"):
        make(tokenizer).process("a", "w7", SamplingParams())
    with pytest.raises(RequestError, match=r"this model generates.*LLM\.generate.*task='embed'"):
        make(tokenizer, None).pooling.process("a", "w7", PoolingParams())


@pytest.mark.parametrize("texts", [("", "w7"), ("w7", ""), ("", "")])
def test_a_text_of_a_pair_may_be_empty(texts, tokenizer):
    want = tokenizer(*texts)
    prompt = make(tokenizer).pooling.tokenize_pair(*texts)
    assert prompt["prompt_token_ids"] == want["input_ids"]
    assert prompt["token_type_ids"] == want["token_type_ids"]


@pytest.mark.parametrize("texts", [("\ud800", "w7"), ("w7", "\ud800")])
def test_both_texts_of_a_pair_have_to_be_text(texts, tokenizer):
    with pytest.raises(RequestError, match="a string to score is"):
        make(tokenizer).pooling.tokenize_pair(*texts)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dimensions", 0),
        ("dimensions", True),
        ("dimensions", "8"),
        ("dimensions", 2**70),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", 1.5),
    ],
)
def test_parameters_out_of_range_are_refused_when_made(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        PoolingParams(**{name: value})
