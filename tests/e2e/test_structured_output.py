"""Test structured output of the bundled model, from request to text: every finished output is
valid.
"""

import json
import random
import re
from typing import Any

import jsonschema
import msgspec
import pytest

from tests.hpu import FEW_BUCKETS, MODES, simulated_hpu
from tests.reach import core_of, scheduler_of
from tests.structured_output.schemas import random_pattern, random_schema
from vllm import LLM, SamplingParams
from vllm.engine.process.wire import AddRequests, decode_to_core, encode
from vllm.guided_decoding_params import GrammarStart
from vllm.sampling_params import GuidedDecodingParams, RequestOutputKind

PROMPTS = ["data = ", "import json\n", "def read(path):\n    ", '{"a": 1}\n']
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}

TINY_ENGINE = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 13,
    "block_size": 16,
}
"""Prompts in chunks, and a cache that eight requests overflow."""


THOUGHTS_END = "\n"
"""Comes soon in what the bundled model writes."""
CALL = "import"
STARTS = {
    "at once": None,
    "thoughts": GrammarStart(is_thinking=True, thought_ends=(THOUGHTS_END,)),
    "thoughts or not": GrammarStart(thought_starts=("#", "def"), thought_ends=(THOUGHTS_END,)),
    "calls": GrammarStart(calls=(CALL,)),
    "all": GrammarStart(is_thinking=True, thought_ends=(THOUGHTS_END,), calls=(CALL,)),
}


def asked(rng: random.Random) -> GuidedDecodingParams:
    """Return a random constraint that begins at once or after some text."""
    guided = asked_at_once(rng)
    start = STARTS[rng.choice(["at once", *STARTS])]
    if start is not None:
        guided.start = msgspec.structs.replace(start, allows_space=guided.ignores_space)
    return guided


def asked_at_once(rng: random.Random) -> GuidedDecodingParams:
    """Return a random constraint of any kind."""
    kind = rng.random()
    if kind < 0.5:
        return GuidedDecodingParams(
            json=random_schema(rng), disable_any_whitespace=rng.random() < 0.5
        )
    if kind < 0.8:
        return GuidedDecodingParams(regex=random_pattern(rng))
    if kind < 0.9:
        return GuidedDecodingParams(choice=["yes", "no", 'not "yet"', "é"])
    return GuidedDecodingParams(grammar='root ::= [a-c]{1,3} "=" [0-9]+ ";"')


def check(guided: GuidedDecodingParams, text: str) -> None:
    """Check that an output satisfies its constraint if it has finished."""
    if (start := guided.start) is not None:
        if start.allows_space and not start.is_thinking:
            text = text.lstrip()
        if start.is_thinking or text.startswith(start.thought_starts):
            _, end, text = text.partition(THOUGHTS_END)
            assert end
        if start.allows_space:
            text = text.lstrip()
        if text.startswith(start.calls):
            return
    if guided.json is not None:
        validator = jsonschema.Draft202012Validator
        validator(guided.json, format_checker=validator.FORMAT_CHECKER).validate(json.loads(text))
    elif guided.regex is not None:
        assert re.fullmatch(guided.regex, text), (guided.regex, text)
    elif guided.choice is not None:
        assert text in guided.choice
    else:
        assert re.fullmatch("[a-c]{1,3}=[0-9]+;", text), text


def seen_by_user(outputs) -> list[list[Any]]:
    return [
        [(tuple(o.token_ids), o.text, o.finish_reason, o.stop_reason) for o in output.outputs]
        for output in outputs
    ]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", max_model_len=256, max_num_seqs=64, num_gpu_blocks_override=1100)


def random_requests(count: int, seed: int) -> tuple[list[str], list[SamplingParams]]:
    rng = random.Random(seed)
    params = [
        SamplingParams(
            temperature=1.0,
            seed=rng.randrange(1000),
            n=rng.choice([1, 1, 2]),
            max_tokens=rng.choice([20, 60, 60]),
            logprobs=rng.choice([None, None, 2]),
            min_tokens=rng.choice([0, 0, 5]),
            ignore_eos=rng.random() < 0.2,
            guided_decoding=asked(rng) if rng.random() < 0.8 else None,
        )
        for _ in range(count)
    ]
    return rng.choices(PROMPTS, k=count), params


@pytest.mark.slow
def test_whatever_ends_validates(llm):
    rng = random.Random(3)
    forms = [asked(rng) for _ in range(100)]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=120, guided_decoding=form)
        for i, form in enumerate(forms)
    ]
    outputs = llm.generate(rng.choices(PROMPTS, k=len(forms)), params, use_tqdm=False)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert set(reasons) <= {"stop", "length"}
    assert reasons.count("stop") > 65
    for form, output in zip(forms, outputs, strict=True):
        if output.outputs[0].finish_reason == "stop":
            check(form, output.outputs[0].text)


@pytest.mark.slow
def test_a_request_gets_the_same_in_a_crowd_as_alone(llm):
    """The load has chunked prefill, prefix caching and preemption, and requests without a
    constraint.
    """
    prompts, params = random_requests(20, seed=5)
    alone = [
        llm.generate([prompt], p, use_tqdm=False)[0]
        for prompt, p in zip(prompts, params, strict=True)
    ]
    crowd = LLM(**TINY_ENGINE)
    assert seen_by_user(crowd.generate(prompts, params, use_tqdm=False)) == seen_by_user(alone)
    scheduler = scheduler_of(crowd)
    assert scheduler.num_preemptions > 0
    assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_usable_blocks


@pytest.mark.slow
@pytest.mark.parametrize("count", [12, pytest.param(24, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "mode", ["HPU graphs", pytest.param("eager", marks=pytest.mark.exhaustive)]
)
def test_the_simulated_card_gives_the_tokens_of_the_cpu_and_compiles_nothing(mode, count, llm):
    prompts, params = random_requests(count, seed=7)
    want = seen_by_user(llm.generate(prompts, params, use_tqdm=False))
    is_lazy, enforce_eager = MODES[mode]
    buckets = FEW_BUCKETS | {"VLLM_DECODE_BS_BUCKET_MIN": 8}
    with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=is_lazy, **buckets) as bridge:
        card = LLM(**TINY_ENGINE, enforce_eager=enforce_eager, sampling_warmup="all")
        before = bridge.counters()
        outputs = card.generate(prompts, params, use_tqdm=False)
        after = bridge.counters()
    assert after.compilations == before.compilations
    assert after.cpu_fallbacks == before.cpu_fallbacks
    assert seen_by_user(outputs) == want


def test_a_stream_has_the_text_of_the_whole(llm):
    engine = llm.llm_engine
    params = SamplingParams(
        temperature=1.0, seed=1, max_tokens=60, guided_decoding=GuidedDecodingParams(json=PERSON)
    )
    whole = llm.generate(["data = "], params, use_tqdm=False)[0].outputs[0]
    params.output_kind = RequestOutputKind.DELTA
    engine.add_request("stream", "data = ", params)
    text = ""
    while engine.has_unfinished_requests():
        text += "".join(output.outputs[0].text for output in engine.step())
    assert text == whole.text
    check(GuidedDecodingParams(json=PERSON), text)


@pytest.mark.parametrize(
    ("options", "text", "finish_reason"),
    [
        ({"regex": "a[0-9]{3}"}, "a[0-9]{3}", "stop"),
        ({"regex": "[0-9]+", "ignore_eos": True, "max_tokens": 9}, "[0-9]{9,}", "length"),
        ({"regex": "[0-9]{2}", "ignore_eos": True}, "[0-9]{2}", "stop"),
        ({"regex": "[0-9]{2}", "min_tokens": 20}, "[0-9]{2}", "stop"),
        ({"regex": "[0-9]*", "min_tokens": 5, "max_tokens": 30}, "[0-9]{5,}", None),
        ({"regex": ""}, "", "stop"),
        ({"choice": ["x"], "stop": ["x"]}, "", "stop"),
        ({"regex": "[a-z]{9}", "bad_words": ["e"], "max_tokens": 30}, "[a-z]{9}", "stop"),
    ],
    ids=str,
)
def test_the_end_of_an_output(llm, options, text, finish_reason):
    guided = GuidedDecodingParams(
        **{k: options.pop(k) for k in ("regex", "choice") if k in options}
    )
    params = SamplingParams(
        **{"temperature": 1.0, "seed": 4, "max_tokens": 40, "guided_decoding": guided, **options}
    )
    output = llm.generate(["x = "], params, use_tqdm=False)[0].outputs[0]
    assert re.fullmatch(text, output.text), output.text
    assert finish_reason in (None, output.finish_reason)


def test_a_request_whose_form_cannot_be_followed_ends_alone(llm):
    good = SamplingParams(temperature=0, max_tokens=5)
    form = GuidedDecodingParams(choice=["yes"])
    letter = llm.get_tokenizer().encode("a", add_special_tokens=False)
    bad = [
        SamplingParams(max_tokens=5, allowed_token_ids=[300], guided_decoding=form),
        SamplingParams(max_tokens=5, bad_words=["y", "ye", "yes"], guided_decoding=form),
        SamplingParams(max_tokens=5, bad_words=["a"], allowed_token_ids=letter),
    ]
    want = llm.generate(["x = "], good, use_tqdm=False)[0].outputs[0]
    first, *failed, last = (
        o.outputs[0] for o in llm.generate(["x = "] * 5, [good, *bad, good], use_tqdm=False)
    )
    assert (first.text, last.text) == (want.text, want.text)
    assert [each.finish_reason for each in failed] == ["error"] * 3
    told = [each.stop_reason.partition(" contradict each other")[0] for each in failed]
    assert told == [
        "allowed_token_ids and guided_decoding",
        "bad_words and guided_decoding",
        "allowed_token_ids and bad_words",
    ]
    assert all(each.is_refused for each in failed)


def test_a_grammar_for_another_tokenizer_ends_its_request(llm):
    engine = llm.llm_engine
    params = SamplingParams(max_tokens=5, guided_decoding=GuidedDecodingParams(regex="a"))
    text, request = engine.input_processor.process("other", "x = ", params)
    grammar = engine.input_processor.attach_grammar(request).grammar
    foreign = msgspec.structs.replace(grammar, vocabulary_key=b"another")
    engine.submit(text, msgspec.structs.replace(request, grammar=foreign))
    finished = []
    while engine.has_unfinished_requests():
        finished += [output for output in engine.step() if output.finished]
    (output,) = finished
    assert output.outputs[0].finish_reason == "error"
    assert "another tokenizer" in output.outputs[0].stop_reason


def test_a_grammar_is_compiled_once_and_attached(llm):
    processor = llm.llm_engine.input_processor
    guided = GuidedDecodingParams(regex="asked here first [0-9]+")
    params = SamplingParams(ignore_eos=True, guided_decoding=guided)
    _, request = processor.process("r", "x = ", params)
    assert request.eos_token_id is not None, "the output must be able to end"
    assert processor.attach_cached_grammar(request) is None
    attached = processor.attach_grammar(request)
    assert attached.grammar is not None
    assert processor.attach_cached_grammar(request) == attached
    assert processor.attach_grammar(attached) is attached
    _, free = processor.process("f", "x = ", SamplingParams())
    assert processor.attach_grammar(free) is free


@pytest.mark.parametrize("limit", [2**64, 1e308])
def test_a_schema_may_hold_numbers_that_no_message_to_the_core_can(llm, limit):
    processor = llm.llm_engine.input_processor
    schema = {"type": "integer", "maximum": limit, "title": 2**64}
    params = SamplingParams(guided_decoding=GuidedDecodingParams(json=schema))
    _, request = processor.process("r", "x = ", params)
    attached = processor.attach_grammar(request)
    (received,) = decode_to_core(encode(AddRequests(requests=[attached]))).requests
    assert received.grammar == attached.grammar
    assert received.sampling_params.guided_decoding is not None, "tells that the output has a form"
    assert params.guided_decoding.json is schema, "the user's parameters stay as they are"


def test_a_request_whose_grammar_was_not_attached_ends(llm):
    core = core_of(llm)
    params = SamplingParams(max_tokens=5, guided_decoding=GuidedDecodingParams(regex="a"))
    _, request = llm.llm_engine.input_processor.process("bare", "x = ", params)
    while core.has_unfinished_requests():  # finish the steps that an earlier test left in flight
        core.step()
    core.add_request(request)
    finished = core.step().finished["bare"]
    assert "was not compiled" in finished.error


def test_a_wrong_form_is_refused_before_anything_runs(llm):
    params = SamplingParams(guided_decoding=GuidedDecodingParams(json={"uniqueItems": True}))
    with pytest.raises(ValueError, match=r"prompt 1 of 2: guided_decoding\.json: 'uniqueItems'"):
        llm.generate(["a", "b"], [SamplingParams(), params], use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
