"""Test converting core outputs to the outputs that users see: kinds of output, samples, finish
reasons, log-probabilities.
"""

import itertools
import random

import pytest

from tests.engine.fakes import logprob_rows
from tests.engine.tokenizers_for_tests import byte_level
from tests.exhaustive import seeds
from vllm.engine.fan_out import fan_out
from vllm.engine.output.output_processor import OutputProcessor
from vllm.errors import RequestError
from vllm.guided_decoding_params import GuidedDecodingParams
from vllm.messages import (
    NO_ALLOWED_TOKEN,
    NO_TOKEN_LEFT,
    EngineOutput,
    EngineRequest,
    Finished,
    FinishReason,
)
from vllm.outputs import Logprob
from vllm.sampling_params import RequestOutputKind, SamplingParams

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
EOS = 1
STOP, LENGTH = Finished(FinishReason.STOP), Finished(FinishReason.LENGTH)
PROMPT = [0, 5, 6]


def encode(text):
    return byte_level()(text, add_special_tokens=False)["input_ids"]


def add(processor, request_id="r", **params):
    """Add a request; return the ids of its parts in the core."""
    sampling_params = SamplingParams(**params)
    request = EngineRequest(
        request_id=request_id,
        prompt_token_ids=PROMPT,
        sampling_params=sampling_params,
        seed=0,
        eos_token_id=EOS,
        max_total_tokens=64,
        arrival_time=100.0,
    )
    samples = fan_out(request)
    processor.add_request(request_id, "prompt", sampling_params, samples)
    return [sample.request_id for sample in samples]


def make(**params):
    processor = OutputProcessor(byte_level())
    add(processor, **params)
    return processor


def tokens(ids, finished=None, **details):
    """Return the output of one step in which each request gets a token."""
    return EngineOutput(
        request_ids=list(ids), token_ids=list(ids.values()), finished=finished or {}, **details
    )


def run(processor, token_ids, end=LENGTH, request_id="r"):
    """Give tokens to one request, the last one with its finish reason. Return all outputs, and the
    requests to abort.
    """
    outputs, aborts = [], []
    for count, token_id in enumerate(token_ids, start=1):
        finished = {request_id: end} if end and count == len(token_ids) else {}
        new, stopped = processor.process(tokens({request_id: token_id}, finished))
        outputs += new
        aborts += stopped
    return outputs, aborts


# ---- kinds of output ----------------------------------------------------------------------


def test_cumulative_outputs_hold_everything_so_far():
    outputs, _ = run(make(output_kind=CUMULATIVE), encode("import os, sys"))
    texts = [output.outputs[0].text for output in outputs]
    assert texts[-1] == "import os, sys"
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert [len(o.outputs[0].token_ids) for o in outputs] == list(range(1, len(outputs) + 1))


def test_earlier_cumulative_outputs_do_not_change_later():
    processor = make(output_kind=CUMULATIVE)
    (first,), _ = processor.process(tokens({"r": 10}))
    processor.process(tokens({"r": 11}))
    assert first.outputs[0].token_ids == [10]


def test_delta_outputs_hold_what_is_new_and_there_is_one_per_token():
    token_ids = encode("import 🙂 os")
    outputs, _ = run(make(output_kind=DELTA), token_ids)
    assert [output.outputs[0].token_ids for output in outputs] == [[t] for t in token_ids]
    assert "".join(output.outputs[0].text for output in outputs) == "import 🙂 os"
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_final_only_is_silent_until_the_end():
    token_ids = encode("import os")
    outputs, _ = run(make(output_kind=FINAL_ONLY), token_ids)
    assert len(outputs) == 1
    assert outputs[0].outputs[0].text == "import os"
    assert outputs[0].outputs[0].token_ids == token_ids


@pytest.mark.parametrize("stop", [[], ["= 3"], ["nothing like it"]])
def test_every_kind_ends_with_the_same_text_tokens_and_log_probabilities(stop):
    token_ids = encode("a = 1\nb = 🙂\nc = 3\nd = 4")[:-1]
    ends = []
    for kind in RequestOutputKind:
        processor = make(output_kind=kind, stop=stop, logprobs=1)
        samples = []
        for count, token_id in enumerate(token_ids, start=1):
            rows = {"r": logprob_rows([token_id], 1)}
            end = {"r": LENGTH} if count == len(token_ids) else {}
            for output in processor.process(tokens({"r": token_id}, end, logprobs=rows))[0]:
                samples += output.outputs
        if kind is not DELTA:
            samples = samples[-1:]
        ends.append(
            (
                "".join(sample.text for sample in samples),
                [token_id for sample in samples for token_id in sample.token_ids],
                [entries for sample in samples for entries in sample.logprobs],
                samples[-1].cumulative_logprob,
                samples[-1].finish_reason,
                samples[-1].stop_reason,
            )
        )
    assert ends[0] == ends[1] == ends[2]


def test_an_output_knows_its_request():
    processor = make()
    (output,), _ = processor.process(tokens({"r": 10}, {"r": LENGTH}, num_cached_tokens={"r": 2}))
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "prompt", PROMPT)
    assert output.num_cached_tokens == 2
    assert output.metrics.arrival_time == 100.0
    assert 100.0 < output.metrics.first_token_time <= output.metrics.finished_time


# ---- how a request ends -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "reason", "stop_reason"),
    [
        (STOP, "stop", None),
        (Finished(FinishReason.STOP, 9), "stop", 9),
        (LENGTH, "length", None),
    ],
)
@pytest.mark.parametrize("kind", RequestOutputKind)
def test_the_end_is_told_with_its_reason(kind, end, reason, stop_reason):
    processor = make(output_kind=kind)
    outputs, aborts = run(processor, [10, 9], end)
    sample = outputs[-1].outputs[0]
    assert (sample.finish_reason, sample.stop_reason) == (reason, stop_reason)
    assert outputs[-1].finished
    assert aborts == []
    assert processor.num_unfinished_requests == 0


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("included", [False, True])
def test_the_token_that_stops_is_kept_and_its_text_left_out_unless_asked_for(kind, included):
    processor = make(output_kind=kind, include_stop_str_in_output=included)
    token_ids = encode("a b")
    outputs, _ = run(processor, token_ids, Finished(FinishReason.STOP, token_ids[-1]))
    if kind is DELTA:
        text = "".join(output.outputs[0].text for output in outputs)
    else:
        text = outputs[-1].outputs[0].text
        assert outputs[-1].outputs[0].token_ids == token_ids
    assert text == ("a b" if included else "a")


def test_eos_is_not_in_the_text_even_when_special_tokens_are():
    outputs, _ = run(make(skip_special_tokens=False), [*encode("a"), EOS], STOP)
    assert outputs[-1].outputs[0].text == "a"
    assert outputs[-1].outputs[0].token_ids[-1] == EOS


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_a_stop_string_ends_the_request_here_and_is_aborted_in_the_core(kind):
    processor = make(output_kind=kind, stop=["c"])
    token_ids = encode("a b c d")
    outputs, aborts = run(processor, token_ids)
    sample = outputs[-1].outputs[0]
    assert aborts == ["r"]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", "c")
    assert outputs[-1].finished
    assert processor.num_unfinished_requests == 0
    text = "".join(o.outputs[0].text for o in outputs) if kind is DELTA else sample.text
    assert text == "a b "


def test_tokens_that_arrive_after_a_stop_string_are_passed_over():
    processor = make(stop=["b"])
    run(processor, encode("a b"), end=None)
    assert processor.process(tokens({"r": 10}, {"r": LENGTH})) == ([], [])


def test_a_stop_string_in_the_last_token_comes_before_the_limit():
    outputs, aborts = run(make(stop=["b"]), encode("a b"), LENGTH)
    assert outputs[-1].outputs[0].finish_reason == "stop"
    assert outputs[-1].outputs[0].stop_reason == "b"
    assert aborts == []  # the core has already ended this request


def test_text_held_back_for_a_stop_string_is_shown_at_the_end():
    outputs, _ = run(make(stop=["</end>"], output_kind=DELTA), encode("a </e"))
    assert "".join(output.outputs[0].text for output in outputs) == "a </e"


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_an_incomplete_character_at_the_end_is_shown_as_decode_shows_it(kind):
    token_ids = encode("a 🙂")[:-1]
    outputs, _ = run(make(output_kind=kind), token_ids)
    samples = [output.outputs[0] for output in outputs]
    text = "".join(sample.text for sample in samples) if kind is DELTA else samples[-1].text
    assert text == byte_level().decode(token_ids)


def test_a_failed_request_tells_why_and_the_others_go_on(caplog):
    processor = make(output_kind=FINAL_ONLY)
    add(processor, "other")
    failed = Finished(FinishReason.ERROR, error="no probabilities")
    outputs, _ = processor.process(tokens({"other": 10}, {"r": failed}))
    by_id = {output.request_id: output for output in outputs}
    assert by_id["r"].finished
    assert by_id["r"].outputs[0].finish_reason == "error"
    assert by_id["r"].outputs[0].stop_reason == "no probabilities"
    assert by_id["other"].outputs[0].token_ids == [10]
    assert processor.num_unfinished_requests == 1


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_aborting_gives_a_last_output_with_what_was_generated(kind):
    processor = make(output_kind=kind)
    shown = [o.outputs[0].text for o in run(processor, encode("a b"), end=None)[0]]
    (output,), core_ids = processor.abort(["r", "unknown", "r"])
    assert core_ids == ["r"]
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    text = "".join(shown) if kind is DELTA else ""
    assert text + output.outputs[0].text == "a b"
    assert processor.num_unfinished_requests == 0
    assert processor.process(tokens({"r": 10})) == ([], [])


@pytest.mark.parametrize("error", [NO_TOKEN_LEFT, NO_ALLOWED_TOKEN])
@pytest.mark.parametrize(
    ("params", "fields"),
    [
        ({"allowed_token_ids": [5], "bad_words": ["a"]}, "allowed_token_ids and bad_words"),
        ({"allowed_token_ids": [5], "min_tokens": 2}, "allowed_token_ids and min_tokens"),
        (
            {
                "allowed_token_ids": [5],
                "guided_decoding": GuidedDecodingParams(choice=["a"], field="guided_choice"),
            },
            "allowed_token_ids and guided_choice",
        ),
        ({"allowed_token_ids": [5]}, None),
        ({}, None),
    ],
)
def test_fields_that_allow_no_token_together_are_a_mistake_of_the_request(params, fields, error):
    processor = make(**params)
    failed = Finished(FinishReason.ERROR, error=error)
    (output,), _ = processor.process(EngineOutput(finished={"r": failed}))
    sample = output.outputs[0]
    assert sample.is_refused == (fields is not None)
    told = f"{fields} contradict each other" if fields else error
    assert sample.stop_reason.startswith(told) and error in sample.stop_reason


def test_an_id_is_refused_while_in_use_and_free_afterwards():
    processor = make(n=2)
    with pytest.raises(RequestError, match="request id 'r' is in use"):
        add(processor, "r")
    with pytest.raises(RequestError, match="'0_r' is in use"):
        add(processor, "0_r")
    assert processor.num_unfinished_requests == 1
    processor.abort(["r"])
    add(processor, "r")


# ---- several outputs of a request ---------------------------------------------------------


def test_samples_are_ordered_by_index_whatever_ends_first():
    processor = make(n=3, output_kind=FINAL_ONLY)
    assert processor.process(tokens({"2_r": 12, "0_r": 10}, {"2_r": LENGTH}))[0] == []
    assert processor.process(tokens({"1_r": 11}, {"1_r": STOP}))[0] == []
    (output,), _ = processor.process(tokens({"0_r": 13}, {"0_r": LENGTH}))
    assert output.request_id == "r"
    assert [sample.index for sample in output.outputs] == [0, 1, 2]
    assert [sample.token_ids for sample in output.outputs] == [[10, 13], [11], [12]]
    assert [sample.finish_reason for sample in output.outputs] == ["length", "stop", "length"]


def test_a_step_gives_one_output_per_request_with_all_samples_when_cumulative():
    processor = make(n=2, output_kind=CUMULATIVE)
    (output,), _ = processor.process(tokens({"0_r": 10, "1_r": 11}))
    assert [sample.token_ids for sample in output.outputs] == [[10], [11]]
    (output,), _ = processor.process(tokens({"1_r": 12}))
    assert [sample.token_ids for sample in output.outputs] == [[10], [11, 12]]


def rank(processor, logprobs, finished):
    """Run a step of four samples whose log-probabilities are the given numbers."""
    rows = {}
    for core_id, logprob in logprobs.items():
        rows[core_id] = logprob_rows([10])
        rows[core_id].logprobs[:] = logprob
    output = tokens(dict.fromkeys(logprobs, 10), finished, logprobs=rows)
    return processor.process(output)[0]


@pytest.mark.parametrize("logprobs", [None, 0])
def test_the_best_samples_are_returned_likeliest_first_without_those_that_failed(logprobs):
    processor = make(n=2, best_of=4, output_kind=FINAL_ONLY, logprobs=logprobs)
    first = {"0_r": -1.0, "1_r": -3.0, "2_r": -0.5, "3_r": -0.1}
    failed = {"3_r": Finished(FinishReason.ERROR, error="no probabilities")}
    assert rank(processor, first, failed) == []
    ends = dict.fromkeys(("0_r", "1_r", "2_r"), LENGTH)
    (output,) = rank(processor, {"0_r": -1.0, "1_r": -0.25, "2_r": -2.0}, ends)
    assert [(s.index, s.cumulative_logprob) for s in output.outputs] == [(0, -2.0), (1, -2.5)]
    assert [s.logprobs is None for s in output.outputs] == [logprobs is None] * 2
    assert output.num_dropped_tokens == 7 - 4
    assert output.finished and processor.num_unfinished_requests == 0


def test_the_best_samples_so_far_are_seen_when_cumulative():
    processor = make(n=1, best_of=2, output_kind=CUMULATIVE)
    (output,) = rank(processor, {"0_r": -2.0, "1_r": -1.0}, {})
    assert [(s.index, s.cumulative_logprob) for s in output.outputs] == [(0, -1.0)]
    (output,) = rank(processor, {"1_r": -5.0}, {"1_r": LENGTH})
    assert [s.cumulative_logprob for s in output.outputs] == [-2.0]
    assert not output.finished
    (output,) = rank(processor, {"0_r": -1.0}, {"0_r": LENGTH})
    assert [s.cumulative_logprob for s in output.outputs] == [-3.0]
    assert output.finished


def test_when_every_sample_fails_the_request_tells_why():
    processor = make(best_of=2, output_kind=FINAL_ONLY)
    error = Finished(FinishReason.ERROR, error="no probabilities")
    (output,) = processor.process(tokens({}, {"0_r": error, "1_r": error}))[0]
    assert [s.stop_reason for s in output.outputs] == ["no probabilities"]


def test_a_delta_holds_only_samples_with_news_and_an_end_is_told_once():
    processor = make(n=2, output_kind=DELTA)
    (output,), _ = processor.process(tokens({"1_r": 12}, {"1_r": LENGTH}))
    assert [(s.index, s.token_ids) for s in output.outputs] == [(1, [12])]
    assert not output.finished
    (output,), _ = processor.process(tokens({"0_r": 10}, {"0_r": LENGTH}))
    assert [(s.index, s.finish_reason) for s in output.outputs] == [(0, "length")]
    assert output.finished


def test_of_several_samples_the_first_tells_what_was_cached_before_the_request():
    processor = make(n=2)
    processor.process(tokens({"0_r": 10}, num_cached_tokens={"0_r": 0}))
    (output,), _ = processor.process(tokens({"1_r": 10}, num_cached_tokens={"1_r": 2}))
    assert output.num_cached_tokens == 0


def test_a_stop_string_ends_one_sample_only():
    processor = make(n=2, stop=["b"], output_kind=FINAL_ONLY)
    (b,), (c,) = encode("b"), encode("c")
    assert processor.process(tokens({"0_r": b, "1_r": c})) == ([], ["0_r"])
    assert processor.abort(["r"])[1] == ["1_r"]


@pytest.mark.parametrize("seed", seeds(8, 20))
def test_any_interleaving_of_streams_adds_up(seed):
    rng = random.Random(seed)
    processor = OutputProcessor(byte_level())
    scripts = {}
    for number in range(6):
        count = rng.randint(1, 3)
        core_ids = add(
            processor, f"q{number}", n=count, output_kind=rng.choice([DELTA, FINAL_ONLY])
        )
        for core_id in core_ids:
            scripts[core_id] = [rng.randrange(7, 4096) for _ in range(rng.randint(1, 12))]
    want = {core_id: list(script) for core_id, script in scripts.items()}
    got = {core_id: ([], "") for core_id in scripts}
    finished = []
    while scripts:
        running = rng.sample(sorted(scripts), rng.randint(1, len(scripts)))
        step = {core_id: scripts[core_id].pop(0) for core_id in running}
        ends = {core_id: LENGTH for core_id in running if not scripts[core_id]}
        scripts = {core_id: script for core_id, script in scripts.items() if script}
        for output in processor.process(tokens(step, ends))[0]:
            for sample in output.outputs:
                single = output.request_id in want
                core_id = output.request_id if single else f"{sample.index}_{output.request_id}"
                ids, text = got[core_id]
                got[core_id] = (ids + sample.token_ids, text + sample.text)
            if output.finished:
                finished.append(output.request_id)
    assert sorted(finished) == [f"q{number}" for number in range(6)]
    decode = byte_level().decode
    assert got == {i: (ids, decode(ids, skip_special_tokens=True)) for i, ids in want.items()}
    assert processor.num_unfinished_requests == 0


# ---- log-probabilities --------------------------------------------------------------------


def run_one(processor, token_id, rows):
    (output,), _ = processor.process(tokens({"r": token_id}, {"r": LENGTH}, logprobs={"r": rows}))
    return output.outputs[0]


def test_a_sampled_token_among_the_likeliest_is_not_listed_twice():
    sample = run_one(make(logprobs=2), 10, logprob_rows([10], 2))
    text = byte_level().decode
    assert list(sample.logprobs[0].items()) == [
        (10, Logprob(-0.5, 1, text([10]))),
        (1, Logprob(-1.5, 2, text([1]))),
    ]


def test_a_sampled_token_beyond_the_likeliest_comes_first_and_adds_an_entry():
    rows = logprob_rows([10], 2)
    rows.token_ids[0, 1] = 20
    rows.ranks[0] = 77
    entries = run_one(make(logprobs=2), 10, rows).logprobs[0]
    assert [(token_id, e.rank) for token_id, e in entries.items()] == [(10, 77), (20, 1), (1, 2)]


def test_no_more_likeliest_tokens_are_given_than_asked_for():
    assert list(run_one(make(logprobs=0), 10, logprob_rows([10], 3)).logprobs[0]) == [10]


def test_the_sum_is_over_the_sampled_tokens():
    processor = make(logprobs=1, output_kind=FINAL_ONLY)
    processor.process(tokens({"r": 10}, logprobs={"r": logprob_rows([10], 1)}))
    sample = run_one(processor, 11, logprob_rows([11], 1))
    assert sample.cumulative_logprob == -1.0
    assert [next(iter(entries)) for entries in sample.logprobs] == [10, 11]


def test_without_asking_there_are_none():
    (output,), _ = make().process(tokens({"r": 10}, {"r": LENGTH}))
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None
    assert output.prompt_logprobs is None


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_prompt_log_probabilities_add_up_over_chunks_and_begin_with_none(kind):
    processor = make(prompt_logprobs=0, output_kind=kind)
    for token_id in PROMPT[1:]:
        rows = logprob_rows([token_id])
        assert processor.process(tokens({}, prompt_logprobs={"r": rows})) == ([], [])
    outputs, _ = run(processor, [10, 11])
    found = outputs[0].prompt_logprobs
    assert found[0] is None
    assert [list(entries) for entries in found[1:]] == [[token_id] for token_id in PROMPT[1:]]
    if kind is DELTA:
        assert outputs[1].prompt_logprobs is None


# ---- outputs without text -----------------------------------------------------------------


def test_without_detokenising_there_are_tokens_and_no_text():
    outputs, _ = run(make(detokenize=False), encode("a b"))
    assert outputs[-1].outputs[0].text == ""
    assert outputs[-1].outputs[0].token_ids == encode("a b")


def test_without_detokenising_log_probabilities_have_no_text():
    processor = make(detokenize=False, logprobs=1, prompt_logprobs=1)
    rows = {"logprobs": {"r": logprob_rows([10], 1)}}
    rows["prompt_logprobs"] = {"r": logprob_rows(PROMPT[1:], 1)}
    (output,), _ = processor.process(tokens({"r": 10}, {"r": LENGTH}, **rows))
    positions = [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]]
    assert len(positions) == len(PROMPT)
    assert {entry.decoded_token for entries in positions for entry in entries.values()} == {None}


def test_without_a_tokenizer_log_probabilities_have_no_text():
    processor = OutputProcessor(None)
    add(processor, logprobs=0)
    sample = run_one(processor, 10, logprob_rows([10]))
    assert sample.text == ""
    assert sample.logprobs == [{10: Logprob(-0.5, 1, None)}]


def test_a_new_tokenizer_is_used_for_new_requests_only():
    processor = make()
    processor.set_tokenizer(None)
    add(processor, "without")
    outputs, _ = processor.process(tokens({"r": encode("a")[0], "without": encode("a")[0]}))
    assert [output.outputs[0].text for output in outputs] == ["a", ""]
