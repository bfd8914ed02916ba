"""Test which values SamplingParams accepts, refuses and changes, with one group of tests per line
of the API table.
"""

import copy
import math
from typing import Any

import msgspec
import numpy as np
import pydantic
import pytest

from vllm.errors import RequestError
from vllm.sampling_params import (
    BeamSearchParams,
    GuidedDecodingParams,
    RequestOutputKind,
    SamplingParams,
    SamplingType,
    StructuredOutputsParams,
)


def refused(**values: Any) -> str:
    """Return the error message with which these values are refused; the error names the field in
    `param`."""
    with pytest.raises(ValueError) as caught:
        SamplingParams(**values)
    assert isinstance(caught.value, RequestError)
    assert caught.value.param is not None
    return str(caught.value)


def test_defaults_are_those_of_the_api():
    params = SamplingParams()
    assert {name: getattr(params, name) for name in params.__struct_fields__} == {
        "n": 1,
        "best_of": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": [],
        "stop_token_ids": [],
        "bad_words": [],
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False,
        "logits_processors": None,
        "truncate_prompt_tokens": None,
        "output_kind": RequestOutputKind.CUMULATIVE,
        "guided_decoding": None,
        "structured_outputs": None,
        "kept_special_token_ids": None,
        "logit_bias": None,
        "allowed_token_ids": None,
        "extra_args": None,
    }


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("n", [1, 2, 100], [0, -1]),
        ("presence_penalty", [-2, 0, 2, 1.5], [-2.01, 2.01, math.nan, math.inf, "1", None]),
        ("frequency_penalty", [-2, 0, 2, 1.5], [-2.01, 2.01, math.nan, -math.inf, "1", None]),
        ("repetition_penalty", [0.01, 1, 5], [0, -1, math.nan, math.inf, "1"]),
        ("temperature", [0, 0.01, 1, 100], [-0.01, -1, math.nan, math.inf, "hot"]),
        ("top_p", [0, 0.001, 0.5, 1], [-0.5, 1.01, math.nan]),
        ("top_k", [-1, 0, 1, 100_000], [-2, -100]),
        ("min_p", [0, 0.5, 1], [-0.01, 1.01, math.nan]),
        ("seed", [0, 1, -5, 2**63 - 1, -(2**63)], [2**63, -(2**63) - 1, 1.5]),
        ("stop_token_ids", [[0], [5, 6], [], None], [["a"], [1.5], [-1], [True]]),
        ("max_tokens", [16, 100_000, None], [0, -1, 1.5]),
        ("min_tokens", [0, 16], [-1, 1.5, 17]),
        ("logprobs", [0, 5, None], [-1, 1.5, "5"]),
        ("prompt_logprobs", [0, 5, None], [-1, 1.5, "5"]),
        ("truncate_prompt_tokens", [1, 100, None], [0, -1, 1.5]),
        ("stop", ["a", ["a", "b"], [], None], ["", ["a", ""], [5]]),
        ("bad_words", [["a", "b c"], [], None], [[""], [5]]),
        ("allowed_token_ids", [[0], [3, 1], None], [[], ["a"], [-1], [0.5]]),
        ("logit_bias", [{1: 5.0, 2: -100}, {}, None], [{-1: 1.0}, {"a": 1.0}, {1: math.nan}, [1]]),
        ("logits_processors", [[max], [], None], [[3], ["max"]]),
    ],
)
def test_values_in_range_are_kept_and_others_refused(field, good, bad):
    for value in good:
        SamplingParams(**{field: value})
    for value in bad:
        assert field in refused(**{field: value})


@pytest.mark.parametrize("value", [1.5, "5", None, 5.0, True])
def test_top_k_of_another_type_is_a_type_error(value):
    with pytest.raises(TypeError, match="top_k"):
        SamplingParams(top_k=value)


def test_n_that_is_no_integer_is_refused():
    with pytest.raises((TypeError, ValueError), match="n must be"):
        SamplingParams(n=1.5)


def test_greedy_sampling_has_one_output():
    message = "n must be 1 when using greedy sampling"
    assert message in refused(n=2, temperature=0)
    SamplingParams(n=2, temperature=0.5)
    SamplingParams(n=1, temperature=0)


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6, 9e-6])
def test_greedy_sampling_resets_what_shapes_the_distribution(temperature):
    params = SamplingParams(temperature=temperature, top_p=0.5, top_k=5, min_p=0.5, logprobs=3)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)
    assert params.sampling_type is SamplingType.GREEDY
    assert params.logprobs == 3


def test_greedy_sampling_still_refuses_bad_values():
    assert "top_p" in refused(temperature=0, top_p=2.0)


@pytest.mark.parametrize("temperature", [2e-5, 0.001, 0.0099])
def test_a_tiny_temperature_is_raised_with_a_warning(temperature):
    with pytest.warns(UserWarning, match=r"0\.01"):
        params = SamplingParams(temperature=temperature, top_p=0.5)
    assert params.temperature == 0.01
    assert params.top_p == 0.5
    assert params.sampling_type is SamplingType.RANDOM


def test_best_of_says_how_many_outputs_are_sampled():
    assert [SamplingParams(n=2, best_of=b).num_sampled for b in (None, 2, 5)] == [2, 2, 5]
    assert [SamplingParams(n=2, best_of=b).is_ranked for b in (None, 2, 5)] == [False, False, True]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 2, "best_of": 1}, "best_of must be at least n (2), got 1"),
        ({"best_of": 0}, "best_of must be at least 1, got 0"),
        ({"best_of": "2"}, "best_of must be an integer, got '2'"),
        ({"best_of": 2, "temperature": 0}, "best_of must be 1 when using greedy sampling"),
        ({"best_of": 2, "output_kind": RequestOutputKind.DELTA}, "best_of (2) must be n (1) with"),
    ],
)
def test_a_best_of_that_cannot_be_ranked_is_refused(params, message):
    assert message in refused(**params)


def test_the_kind_of_output_is_checked_again_after_a_change():
    params = SamplingParams(best_of=2)
    params.output_kind = RequestOutputKind.DELTA
    with pytest.raises(RequestError, match="ranking needs complete outputs"):
        params.check_ranking()


def test_seed_minus_one_is_no_seed():
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=-1).sampling_type is SamplingType.RANDOM
    assert SamplingParams(seed=0).sampling_type is SamplingType.RANDOM_SEED
    assert SamplingParams(seed=0, temperature=0).sampling_type is SamplingType.GREEDY


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="abc").stop == ["abc"]
    assert SamplingParams(stop=("a", "b")).stop == ["a", "b"]


def test_stop_strings_need_text():
    assert "detokenize" in refused(stop="a", detokenize=False)
    SamplingParams(stop=[], detokenize=False)
    SamplingParams(stop_token_ids=[1], detokenize=False)


def test_lists_of_the_caller_are_copied():
    stop, ids, words = ["a"], [1], ["b"]
    params = SamplingParams(stop=stop, stop_token_ids=ids, bad_words=words)
    for values in (stop, ids, words):
        values.clear()
    assert (params.stop, params.stop_token_ids, params.bad_words) == (["a"], [1], ["b"])


def test_no_two_instances_share_a_list():
    SamplingParams().stop.append("a")
    assert SamplingParams().stop == []


def test_min_tokens_must_fit_into_max_tokens():
    assert "max_tokens" in refused(min_tokens=5, max_tokens=4)
    SamplingParams(min_tokens=5, max_tokens=5)
    SamplingParams(min_tokens=5, max_tokens=None)


def test_logprobs_true_is_one():
    params = SamplingParams(logprobs=True, prompt_logprobs=True)
    assert (params.logprobs, params.prompt_logprobs) == (1, 1)
    assert type(params.logprobs) is int


def test_logprobs_zero_is_not_none():
    assert SamplingParams(logprobs=0).logprobs == 0
    assert SamplingParams().logprobs is None


def test_output_kinds_have_the_numbers_of_the_api():
    assert [(kind.name, kind.value) for kind in RequestOutputKind] == [
        ("CUMULATIVE", 0),
        ("DELTA", 1),
        ("FINAL_ONLY", 2),
    ]


def test_logits_processors_must_be_callable():
    def processor(output_ids, logits):
        return logits

    assert SamplingParams(logits_processors=[processor]).logits_processors == [processor]
    assert "callable" in refused(logits_processors=["processor"])


def test_structured_outputs_is_another_name_of_guided_decoding():
    constraint = StructuredOutputsParams(regex="a+")
    for given in (constraint, {"regex": "a+"}):
        params = SamplingParams(structured_outputs=given)
        assert params == SamplingParams(guided_decoding=given)
        assert params.clone().guided_decoding == constraint
    for wrong in (
        {"guided_decoding": constraint, "structured_outputs": constraint},
        {"structured_outputs": {"regexp": "a+"}},
        {"structured_outputs": "a+"},
        {"guided_decoding": {"regex": "a", "choice": ["a"]}},
    ):
        with pytest.raises(ValueError, match=r"both given|no field 'regexp'|got str|one kind"):
            SamplingParams(**wrong)


def test_a_schema_may_be_a_class_of_pydantic():
    model = pydantic.create_model("City", name=(str, ...))
    for params in (
        GuidedDecodingParams(json=model),
        SamplingParams(guided_decoding={"json": model}).guided_decoding,
    ):
        assert params.json == model.model_json_schema()


def test_guided_decoding_takes_one_kind():
    GuidedDecodingParams(regex="a+", backend="any", whitespace_pattern=" ")
    GuidedDecodingParams(json_object=False, choice=["a"])
    with pytest.raises(ValueError, match="regex, choice"):
        GuidedDecodingParams(regex="a+", choice=["a"])


def test_from_optional_takes_none_for_the_default():
    params = SamplingParams.from_optional(
        n=None, temperature=None, top_p=None, top_k=None, stop=None, seed=None, min_p=None
    )
    assert params == SamplingParams()
    assert SamplingParams.from_optional(temperature=0.5, top_k=3) == SamplingParams(
        temperature=0.5, top_k=3
    )


def test_from_optional_keeps_no_limit_of_tokens():
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    assert SamplingParams.from_optional().max_tokens == 16


def test_from_optional_clamps_bias_and_takes_keys_of_json():
    params = SamplingParams.from_optional(logit_bias={"1": 200, 2: -200.0, "3": 0.5})
    assert params.logit_bias == {1: 100.0, 2: -100.0, 3: 0.5}
    for bad in ({"a": 1}, {1: "x"}, {1: None}, [1]):
        with pytest.raises(RequestError, match="logit_bias"):
            SamplingParams.from_optional(logit_bias=bad)


@pytest.mark.parametrize(
    ("config", "eos", "expected"),
    [
        ({}, None, set()),
        ({}, 2, {2}),
        ({"eos_token_id": 3}, 2, {2, 3}),
        ({"eos_token_id": [2, 3, np.int64(4)]}, 2, {2, 3, 4}),
        ({"eos_token_id": None, "temperature": 0.5}, 0, {0}),
    ],
)
def test_end_tokens_of_a_model_are_told_from_the_users_stop_tokens(config, eos, expected):
    params = SamplingParams(stop_token_ids=[9])
    assert params.all_stop_token_ids == {9}
    params.update_from_generation_config(config, eos)
    assert params.all_stop_token_ids == params.clone().all_stop_token_ids == {9, *expected}
    assert params.stop_token_ids == [9] and params.temperature == 1.0
    assert params == SamplingParams(stop_token_ids=[9])
    params.update_from_generation_config({"eos_token_id": 7})
    assert params.all_stop_token_ids == {7, 9}
    params.ignore_eos = True
    assert params.all_stop_token_ids == {9}


@pytest.mark.parametrize(("config", "eos"), [({"eos_token_id": ["</s>"]}, 2), ({}, -1)])
def test_end_tokens_that_are_none_are_refused(config, eos):
    with pytest.raises(RequestError, match="eos_token_id must hold token ids"):
        SamplingParams().update_from_generation_config(config, eos)


def test_a_clone_can_be_changed_alone():
    def processor(output_ids, logits):
        return logits

    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, logits_processors=[processor], top_k=3)
    clone = params.clone()
    assert clone == params and clone is not params
    clone.stop.append("b")
    clone.logit_bias[5] = 1.0
    clone.top_k = 9
    assert (params.stop, params.logit_bias, params.top_k) == (["a"], {1: 2.0}, 3)
    assert clone.logits_processors[0] is processor


def test_a_clone_shares_processors_that_cannot_be_copied():
    class Processor:
        def __call__(self, output_ids, logits):
            return logits

        def __deepcopy__(self, memo):
            raise AssertionError("holds a lock, a model or a grammar")

    processor = Processor()
    clone = SamplingParams(logits_processors=[processor]).clone()
    assert clone.logits_processors == [processor]


def test_repr_shows_every_field():
    text = repr(SamplingParams(temperature=0.5))
    assert text.startswith("SamplingParams(")
    assert "temperature=0.5" in text
    assert all(f"{name}=" in text for name in SamplingParams.__struct_fields__)


def test_parameters_survive_the_process_boundary():
    params = SamplingParams(
        n=2,
        temperature=0.5,
        stop="a",
        logit_bias={3: 1.5},
        seed=-7,
        output_kind=RequestOutputKind.DELTA,
    )
    data = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.Decoder(SamplingParams).decode(data) == params
    assert copy.deepcopy(params) == params


def test_unknown_fields_are_refused():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)


def test_beam_search_needs_a_width_and_a_length():
    params = BeamSearchParams(beam_width=2, max_tokens=5)
    assert (params.ignore_eos, params.temperature, params.length_penalty) == (False, 0.0, 1.0)
    for values in ({"beam_width": 0}, {"max_tokens": 0}, {"temperature": -1.0}):
        with pytest.raises(RequestError):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 5, **values})


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logits_processors"])
def test_a_single_value_where_a_list_belongs_is_refused(name):
    with pytest.raises(RequestError, match=f"{name} must be a list"):
        SamplingParams(**{name: 5})


def test_one_bad_word_is_not_taken_for_a_list_of_letters():
    with pytest.raises(RequestError, match="bad_words must be a list"):
        SamplingParams(bad_words="foo")


@pytest.mark.parametrize("bias", [{1: math.nan}, {1.7: 1.0}, {"x": 1.0}, [1], {1: "much"}])
def test_a_bad_logit_bias_is_refused(bias):
    with pytest.raises(RequestError, match="logit_bias"):
        SamplingParams.from_optional(logit_bias=bias)


def test_a_logit_bias_of_json_is_read_and_clamped():
    params = SamplingParams.from_optional(logit_bias={"7": 1000, "8": -0.5})
    assert params.logit_bias == {7: 100.0, 8: -0.5}


def test_numbers_of_numpy_become_plain_ones():
    params = SamplingParams(n=np.int64(2), top_p=np.float32(0.5), stop_token_ids=[np.int32(3)])
    assert type(params.n) is int and type(params.top_p) is float
    assert type(params.stop_token_ids[0]) is int
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_an_unknown_output_kind_is_refused():
    with pytest.raises(RequestError, match="output_kind"):
        SamplingParams(output_kind=7)


def test_a_clone_keeps_attributes_that_were_added():
    params = SamplingParams(stop=["x"])
    params.note = "mine"
    own = params.clone()
    own.stop.append("y")
    assert own.note == "mine" and params.stop == ["x"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("ignore_eos", value) for value in (2, 1.5, "x", [], {}, None)),
        *((name, "x") for name in ("detokenize", "skip_special_tokens")),
        *((name, []) for name in ("spaces_between_special_tokens", "include_stop_str_in_output")),
        *(("stop", ["\ud800"]), ("bad_words", ["a", "\udc80"])),
        *((name, 2**63) for name in ("top_k", "max_tokens", "n", "logprobs", "prompt_logprobs")),
    ],
)
def test_what_no_other_process_could_read_is_refused(field, value):
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("value", [1, 0, np.bool_(True), np.int64(0), True])
def test_any_form_of_true_and_false_is_taken(value):
    taken = SamplingParams(ignore_eos=value).ignore_eos
    assert taken is bool(value)
