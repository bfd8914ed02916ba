"""Test speculative decoding as users switch it on: the same outputs in fewer steps."""

import pytest

from tests.e2e.test_drafts import seen_by_user
from tests.hpu import FEW_BUCKETS, SMALL_ENGINE, simulated_hpu
from tests.reach import stats_of
from vllm import LLM, SamplingParams
from vllm.guided_decoding_params import GrammarStart
from vllm.sampling_params import GuidedDecodingParams

CODE = "def area(w, h):\n    return w * h\n\ndef volume(w, h, d):\n    return w * h * d\n\n"
PROMPTS = [CODE + CODE, CODE[:20], "x = [1, 2]\n" * 4, CODE + "def area(w, h):", "import os\n"]
PARAMS = [
    SamplingParams(max_tokens=48, temperature=0, ignore_eos=True, logprobs=1),
    SamplingParams(max_tokens=40, temperature=0.9, seed=5, top_p=0.9, n=2),
    SamplingParams(max_tokens=40, temperature=0, stop=["return"]),
    SamplingParams(max_tokens=30, temperature=0, repetition_penalty=1.1),
    SamplingParams(max_tokens=40, temperature=0.3, seed=1, min_tokens=20),
]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["width", "height"]}, "values": {"type": "array"}},
    "required": ["name", "values"],
}
BEHIND_A_LINE = GrammarStart(is_thinking=True, thought_ends=("\n",))
FOLLOWING = [
    SamplingParams(max_tokens=60, temperature=0.9, seed=s, guided_decoding=guided, **more)
    for s, (guided, more) in enumerate(
        [
            (GuidedDecodingParams(json=SCHEMA), {}),
            (GuidedDecodingParams(json=SCHEMA, backend="guidance"), {"min_tokens": 30}),
            (
                GuidedDecodingParams(regex="(ab|cd)+ef", start=BEHIND_A_LINE),
                {"repetition_penalty": 1.2},
            ),
            (None, {"frequency_penalty": 0.5, "presence_penalty": 0.2, "logprobs": 1}),
            (None, {"bad_words": ["return w", "* h"], "logit_bias": {300: 1.0}}),
        ]
    )
]
"""Their sampling depends on their output."""


def run(llm: LLM, params: list[SamplingParams] = PARAMS) -> list:
    return [seen_by_user(o) for o in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected():
    return run(LLM(dtype="float32", max_model_len=128))


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_outputs_are_the_same_and_drafts_are_counted(method, expected):
    speculative = {"method": method, "num_speculative_tokens": 4, "adaptive": False}
    options = {"speculative_config": speculative, "disable_log_stats": False}
    llm = LLM(dtype="float32", max_model_len=128, **options)
    assert run(llm) == expected
    assert run(llm) == expected, "with what the suffix cache remembers"
    values = {metric.name: metric for metric in llm.get_metrics()}
    accepted = values["vllm:spec_decode_num_accepted_tokens"].value
    assert 20 < accepted <= values["vllm:spec_decode_num_draft_tokens"].value
    by_place = values["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    assert sum(by_place) == accepted
    assert by_place == sorted(by_place, reverse=True)


def test_requests_that_follow_their_output_get_drafts():
    common = {"dtype": "float32", "max_model_len": 128}
    want = run(LLM(**common), FOLLOWING)
    speculative = {"method": "suffix", "prompt_lookup_min": 1, "adaptive": False}
    llm = LLM(speculative_config=speculative, **common)
    assert run(llm, FOLLOWING) == want
    assert run(llm, FOLLOWING) == want, "with what the suffix cache remembers"
    stats = stats_of(llm)
    num_tokens = 2 * sum(len(sample[0]) for output in want for sample in output)
    assert sum(stats.drafts.accepted) > num_tokens / 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_every_kind_of_sampling_has_the_same_outputs_on_the_simulated_card(method, expected):
    want = expected + run(LLM(dtype="float32", max_model_len=128), FOLLOWING)
    speculative = {"method": method, "num_speculative_tokens": 4, "adaptive": False}
    with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **FEW_BUCKETS):
        llm = LLM(speculative_config=speculative, **SMALL_ENGINE)
        assert run(llm) + run(llm, FOLLOWING) == want
    drafts = stats_of(llm).drafts
    assert 50 < sum(drafts.accepted) < drafts.num_draft_tokens
