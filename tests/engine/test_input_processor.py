"""Test converting a prompt to a request: every accepted type, every bad input, and that the input
is not changed.
"""

import numpy as np
import pytest

from tests.engine.fakes import make_config
from tests.engine.tokenizers_for_tests import byte_level
from vllm.engine.fan_out import fan_out
from vllm.engine.input.input_processor import InputProcessor
from vllm.errors import PromptTooLongError, RequestError
from vllm.sampling_params import GuidedDecodingParams, SamplingParams

BOS, EOS, END_OF_TURN = 0, 1, 6
VOCAB_SIZE = 4096


def make_processor(tokenizer=True, defaults=None, **config):
    defaults = {"eos_token_ids": [EOS, END_OF_TURN]} if defaults is None else defaults
    return InputProcessor(make_config(**config), byte_level() if tokenizer else None, defaults)


def process(prompt, processor=None, **params):
    processor = processor or make_processor()
    return processor.process("r", prompt, SamplingParams(**params))


# ---- prompts ------------------------------------------------------------------------------


class CountingTokenizer:
    """A tokenizer that counts how often it is called."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.num_calls = 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, *args, **more):
        self.num_calls += 1
        return self._tokenizer(*args, **more)


def test_text_is_tokenised_with_the_special_tokens_of_the_tokenizer():
    text, request = process("import os")
    assert text == "import os"
    assert request.prompt_token_ids[0] == BOS
    assert byte_level().decode(request.prompt_token_ids[1:]) == "import os"
    assert process({"prompt": "import os"})[1].prompt_token_ids == request.prompt_token_ids


@pytest.mark.parametrize(
    "prompt", [[5, 6, 7], (5, 6, 7), {"prompt_token_ids": [5, 6, 7]}, list(np.array([5, 6, 7]))]
)
def test_token_ids_are_run_as_they_are(prompt):
    text, request = process(prompt)
    assert text is None
    assert request.prompt_token_ids == [5, 6, 7]
    assert all(type(token_id) is int for token_id in request.prompt_token_ids)


def test_token_ids_with_their_text_are_not_tokenised_again():
    text, request = process({"prompt_token_ids": [5, 6], "prompt": "shown"})
    assert (text, request.prompt_token_ids) == ("shown", [5, 6])


def test_the_cache_salt_goes_along():
    assert process({"prompt": "a", "cache_salt": "x"})[1].cache_salt == "x"
    assert process("a")[1].cache_salt is None


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt has no tokens"),
        ({"prompt_token_ids": []}, "the prompt has no tokens"),
        ({}, "the prompt is empty"),
        (5, "a prompt cannot be of type int: expected a string, a list of token ids"),
        (None, "a prompt cannot be of type NoneType"),
        (b"abc", "a prompt cannot be of type bytes"),
        ({"prompt": 5}, "'prompt' of a prompt must be a string, got int"),
        ({"promt": "a"}, "unknown key 'promt'; accepted"),
        ({"prompt_token_ids": "abc"}, "a prompt cannot be of type str"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt must be a non-empty string"),
        (
            {"prompt": "a", "multi_modal_data": {"image": 1}},
            "multi_modal_data: the model 'stdlib' reads text only",
        ),
        ({"encoder_prompt": "a", "decoder_prompt": None}, "encoder_prompt: this model has no"),
        ([1, "b"], "token ids must be integers, got str 'b' at position 1"),
        ([1, 2.0], "token ids must be integers, got float 2.0 at position 1"),
        ([True], "token ids must be integers, got bool True at position 0"),
        ([[1, 2]], "token ids must be integers, got list [1, 2] at position 0"),
        ([5, VOCAB_SIZE], "token id 4096 at position 1 of the prompt is not in the vocabulary"),
        ([-1], "token id -1 at position 0 of the prompt is not in the vocabulary of 4096"),
        ("a\ud800", "the prompt is not valid text: surrogates not allowed at character 1"),
    ],
)
def test_a_bad_prompt_is_refused_with_what_is_wrong(prompt, message):
    with pytest.raises(RequestError) as failure:
        process(prompt)
    assert message in str(failure.value)
    assert "\n" not in str(failure.value)


def test_an_empty_text_is_a_prompt_where_special_tokens_are_added():
    assert process("")[1].prompt_token_ids == process([BOS])[1].prompt_token_ids == [BOS]
    with pytest.raises(RequestError, match=rf"the prompt is empty, and .*\[{BOS}\]"):
        process({"prompt": "", "add_special_tokens": False})


def test_a_prompt_must_leave_room_for_one_output_token():
    assert len(process([5] * 63)[1].prompt_token_ids) == 63
    with pytest.raises(PromptTooLongError, match="64 tokens") as failure:
        process([5] * 64)
    assert failure.value.param == "prompt"


def test_truncation_keeps_the_last_tokens_and_comes_before_the_length_check():
    assert process(list(range(100)), truncate_prompt_tokens=3)[1].prompt_token_ids == [97, 98, 99]
    assert process([5, 6], truncate_prompt_tokens=3)[1].prompt_token_ids == [5, 6]


# ---- limits and end tokens ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_tokens", "total"), [(1, 3), (16, 18), (62, 64), (63, 64), (None, 64)]
)
def test_a_request_ends_at_max_tokens_or_at_max_model_len(max_tokens, total):
    assert process([5, 6], max_tokens=max_tokens)[1].max_total_tokens == total


def test_end_tokens_of_the_model_beside_eos_stop_like_stop_tokens_of_the_user():
    request = process("a", stop_token_ids=[9])[1]
    assert request.eos_token_id == EOS
    assert request.stop_token_ids == {9, END_OF_TURN}


def test_ignore_eos_ignores_every_end_token_of_the_model_but_not_the_users():
    request = process("a", stop_token_ids=[9], ignore_eos=True)[1]
    assert request.eos_token_id is None
    assert request.stop_token_ids == {9}


@pytest.mark.parametrize(("ignore_eos", "expected"), [(False, {9, 7, END_OF_TURN}), (True, {9})])
def test_end_tokens_that_parameters_have_taken_over_end_an_output(ignore_eos, expected):
    params = SamplingParams(stop_token_ids=[9], ignore_eos=ignore_eos)
    params.update_from_generation_config({"eos_token_id": [EOS, 7]}, EOS)
    assert make_processor().process("0", "a", params)[1].stop_token_ids == expected


def test_without_a_tokenizer_the_end_token_is_that_of_config_json():
    request = process([5], make_processor(tokenizer=False, defaults={}))[1]
    assert request.eos_token_id == EOS
    assert request.stop_token_ids == frozenset()


# ---- sampling parameters ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logprobs": 21}, "logprobs must be at most 20 (max_logprobs of the engine), got 21"),
        (
            {"prompt_logprobs": 21},
            "prompt_logprobs must be at most 20 (max_logprobs of the engine), got 21",
        ),
        ({"allowed_token_ids": [1, 4096]}, "allowed_token_ids has token id 4096"),
        ({"logit_bias": {4096: 1.0}}, "logit_bias has token id 4096"),
        ({"stop_token_ids": [4096]}, "stop_token_ids has token id 4096"),
        (
            {"guided_decoding": GuidedDecodingParams(backend="auto")},
            "guided_decoding is empty: set one of json, json_object, regex, choice",
        ),
    ],
)
def test_parameters_the_engine_cannot_serve_are_refused_by_name(params, message):
    with pytest.raises(RequestError) as failure:
        process("a", **params)
    assert message in str(failure.value)
    assert failure.value.param == next(iter(params))


def test_the_limit_of_logprobs_is_the_engines():
    assert process("a", make_processor(max_logprobs=30), logprobs=30)[1].sampling_params.logprobs


def test_something_else_than_sampling_params_is_refused():
    with pytest.raises(RequestError, match="the parameters must be SamplingParams, got dict"):
        make_processor().process("r", "a", {"temperature": 0})


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("a", {}, "a text prompt needs a tokenizer"),
        ([5], {"stop": "x"}, "stop needs a tokenizer"),
        ([5], {"bad_words": ["x"]}, "bad_words needs a tokenizer"),
    ],
)
def test_without_a_tokenizer_what_needs_one_is_refused(prompt, params, message):
    with pytest.raises(RequestError, match=message):
        process(prompt, make_processor(tokenizer=False), **params)


def test_bad_words_are_tokenised_as_they_begin_a_text_and_as_they_follow_a_word():
    sequences = process("a", bad_words=["import os"])[1].bad_words_token_ids
    assert [byte_level().decode(ids) for ids in sequences] == ["import os", " import os"]
    assert not any(BOS in ids for ids in sequences)


def test_bad_words_are_tokenised_together_and_once_for_all_prompts():
    processor = make_processor()
    tokenizer = CountingTokenizer(processor.tokenizer)
    processor.tokenizer = tokenizer
    params = SamplingParams(bad_words=[f"word {i % 500}" for i in range(1000)])
    requests = [processor.process(f"r{i}", [5], params)[1] for i in range(3)]
    assert tokenizer.num_calls == 1
    first = requests[0].bad_words_token_ids
    assert all(request.bad_words_token_ids is first for request in requests)
    assert len(first) == len(set(map(tuple, first))) == 1000


def test_a_bad_word_of_white_space_alone_stays_as_it_is():
    sequences = process("a", bad_words=["\n"])[1].bad_words_token_ids
    assert [byte_level().decode(ids) for ids in sequences] == ["\n"]


def test_the_parameters_of_the_caller_are_not_changed():
    params = SamplingParams(n=3, seed=1, stop="a", stop_token_ids=[9], prompt_logprobs=2)
    before = repr(params)
    fan_out(make_processor().process("r", "a", params)[1])
    assert repr(params) == before


# ---- seeds and several outputs -------------------------------------------------------------------


def test_requests_without_a_seed_get_the_same_ones_in_every_run():
    def seeds(**config):
        processor = make_processor(**config)
        return [process("a", processor)[1].seed for _ in range(3)]

    assert len(set(seeds())) == 3
    assert seeds() == seeds()
    assert seeds() != seeds(seed=1)


def test_a_seed_is_kept_and_takes_nothing_from_the_others():
    processor, other = make_processor(), make_processor()
    assert process("a", processor, seed=7)[1].seed == 7
    assert process("a", processor)[1].seed == process("a", other)[1].seed


def test_one_sample_is_the_request_itself():
    request = process("a")[1]
    assert fan_out(request) == [request]


def test_several_samples_have_ids_seeds_and_parameters_of_their_own():
    request = process("a", n=3, seed=2**63 - 2, prompt_logprobs=1)[1]
    samples = fan_out(request)
    assert [s.request_id for s in samples] == ["0_r", "1_r", "2_r"]
    assert [s.seed for s in samples] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert [s.sampling_params.seed for s in samples] == [s.seed for s in samples]
    assert [s.sampling_params.n for s in samples] == [1, 1, 1]
    assert [s.sampling_params.prompt_logprobs for s in samples] == [1, None, None]
    assert all(s.prompt_token_ids == request.prompt_token_ids for s in samples)
