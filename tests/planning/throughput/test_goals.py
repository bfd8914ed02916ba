"""Test the throughput of batches, and the search for goals against trying all batches."""

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.fit_cost_model import MODELS
from vllm.cost_model.throughput import PARTS, ServingCost
from vllm.errors import ConfigError
from vllm.planning.throughput.goals import Goals, search
from vllm.planning.throughput.prediction import Lengths, Prediction, predict

LLAMA_8B, LLAMA_70B = MODELS["llama-3.1-8b"], MODELS["llama-3.1-70b"]
LENGTHS = Lengths(1024, 256)
HELD = {1: 40, 2: 90, 4: 200, 8: 400}
"""Requests that the KV cache holds, by number of cards."""


def predicted(num_cards: int, batch, lengths: Lengths = LENGTHS, figures=LLAMA_70B) -> Prediction:
    cost = ServingCost("gaudi2", num_cards, figures)
    return predict(cost, batch, lengths, block_size=128, longest_prefill=8192)


def predictions() -> list[tuple[int, Prediction]]:
    return [(cards, predicted(cards, np.arange(1, held + 1))) for cards, held in HELD.items()]


def test_more_requests_at_a_time_are_slower_each_and_faster_together():
    found = predicted(2, np.arange(1, 90))
    assert (np.diff(found.expected.ttft_s) > 0).all()
    assert (np.diff(found.expected.tpot_s) > 0).all()
    assert (np.diff(found.expected.tokens_per_s) > 0).all()
    assert (found.slow.tokens_per_s <= found.expected.tokens_per_s).all()
    assert (found.expected.tokens_per_s <= found.fast.tokens_per_s).all()
    assert set(found.prefill_bound) | set(found.decode_bound) <= set(PARTS)


def test_a_request_alone_takes_its_prefill_and_its_decodes():
    found = predicted(1, 1, figures=LLAMA_8B).expected
    prefill_s = 1024 / found.prompt_tokens_per_s[0]
    decode_s = 1 / found.decode_tokens_per_s[0]
    np.testing.assert_allclose(found.tpot_s, decode_s)
    np.testing.assert_allclose(found.tokens_per_s, 256 / (prefill_s + 255 * decode_s))


def test_a_long_prompt_is_prefilled_in_chunks():
    cost = ServingCost("gaudi2", 1, LLAMA_8B)
    chunked = predict(cost, 1, Lengths(20_000, 1), block_size=128, longest_prefill=8192)
    chunks = cost.prefill_seconds(1, np.array([8192, 8192, 3712]), np.array([0, 64, 128]))
    np.testing.assert_allclose(chunked.expected.prompt_tokens_per_s, 20_000 / chunks.seconds.sum())
    assert chunked.outside == ("prompt over 2,048",)


GOALS = [
    Goals(ttft_ms=500),
    Goals(tpot_ms=50),
    Goals(tokens_per_s=900),
    Goals(tokens_per_s=3000),
    Goals(ttft_ms=400, tpot_ms=60, tokens_per_s=500),
    Goals(ttft_ms=0.001),
    Goals(tpot_ms=20, tokens_per_s=1e5),
]


@pytest.mark.parametrize("goals", GOALS, ids=str)
def test_the_search_finds_what_a_scan_of_all_batches_finds(goals):
    found = search(goals, predictions())
    scanned = []
    for num_cards, held in HELD.items():
        for batch in range(1, held + 1):
            speed = predicted(num_cards, batch).expected
            factors = [
                *([1e3 * float(speed.ttft_s[0]) / goals.ttft_ms] if goals.ttft_ms else []),
                *([1e3 * float(speed.tpot_s[0]) / goals.tpot_ms] if goals.tpot_ms else []),
                *(
                    [goals.tokens_per_s / float(speed.tokens_per_s[0])]
                    if goals.tokens_per_s
                    else []
                ),
            ]
            scanned.append((max(factors), num_cards, batch))
    met = [(-num_cards, batch) for factor, num_cards, batch in scanned if factor <= 1]
    if met:
        assert (-found.num_cards, found.max_num_seqs) == max(met)
        assert found.misses == ()
    else:
        assert (found.num_cards, found.max_num_seqs) == min(scanned)[1:]
        assert found.misses
    assert found.prediction.batch == [found.max_num_seqs]


def test_goals_that_nothing_meets_say_what_misses():
    found = search(Goals(ttft_ms=0.001, tokens_per_s=10), predictions())
    assert [miss.name for miss in found.misses] == ["ttft_ms"]
    assert "time to first token" in str(found.misses[0])
    assert "ms (goal: at most 0.001)" in str(found.misses[0])


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("ttft_ms", "--goal-ttft"),
        ("tpot_ms", "--goal-tpot"),
        ("tokens_per_s", "--goal-tokens-per-s"),
    ],
)
def test_a_goal_that_is_no_number_above_zero_is_refused(name, flag, value):
    with pytest.raises(ConfigError, match=f"{flag} must be a number above 0, in ") as error:
        replace(Goals(), **{name: value})
    assert "\n" not in str(error.value)
