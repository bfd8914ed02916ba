"""Test predicted steps: what makes them slower, what bounds them, and predictions far from any
published run.
"""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.fit_cost_model import MODELS, predicted_mlperf
from tests.loops import loop_over
from vllm.cost_model.throughput import PARTS, ServingCost

LLAMA_8B, LLAMA_70B = MODELS["llama-3.1-8b"], MODELS["llama-2-70b"]
MIXTURE = replace(
    LLAMA_8B, dense_params=1.3e9, expert_params=5.6e9, num_experts=8, experts_per_token=2
)


@loop_over("figures", [LLAMA_8B, LLAMA_70B, MIXTURE])
@loop_over("num_cards", [1, 2, 4, 8])
@loop_over("card", ["gaudi2", "gaudi3"])
def test_no_larger_step_is_faster(card, num_cards, figures):
    cost = ServingCost(card, num_cards, figures)
    batch, length = np.array([1, 2, 7, 64, 512]), np.array([1, 100, 128, 2048, 100_000])
    prefill = cost.prefill_seconds(batch[:, None, None], length[:, None], np.array([0, 1, 800]))
    decode = cost.decode_seconds(batch[:, None, None], 128 * length[:, None], np.array([1, 2, 5]))
    for step in (prefill, decode):
        assert step.seconds.shape == (5, 5, 3)
        for axis in range(3):
            assert (np.diff(step.seconds, axis=axis) >= 0).all()
        assert (step.low <= step.seconds).all() and (step.seconds <= step.high).all()
        np.testing.assert_allclose(sum(step.part(name) for name in PARTS), step.seconds)


def test_what_bounds_a_step():
    cost = ServingCost("gaudi2", 1, LLAMA_8B)
    assert cost.prefill_seconds(8, 2048).bound_by == "matmuls"
    assert cost.decode_seconds(1, 128).bound_by == "weights"
    assert cost.decode_seconds(64, 64 * 4096).bound_by == "KV cache"
    assert cost.decode_seconds(1, 128).part("links") == 0
    on_two = ServingCost("gaudi3", 2, LLAMA_8B).prefill_seconds(8, 2048)
    assert on_two.part("links") > 0.3 * on_two.seconds
    tiny = replace(LLAMA_8B, dense_params=1e6, vocab_size=1000)
    assert ServingCost("gaudi2", 1, tiny).decode_seconds(1, 128).bound_by == "launches"


def test_a_mixture_reads_more_experts_the_more_tokens_there_are():
    read = MIXTURE.params_read(np.array([1.0, 4.0, 1e6]))
    dense = 1.3e9 + 4096 * 128256
    np.testing.assert_allclose(read[[0, 2]], [dense + 2 * 5.6e9, dense + 8 * 5.6e9])
    assert read[0] < read[1] < read[2]


def test_the_offline_run_of_mlperf_lies_near_static_batches_of_its_mean_lengths():
    published = 8034.85
    for tokens_per_s in predicted_mlperf().values():
        assert 0.8 < tokens_per_s / published < 1.3


@pytest.mark.parametrize(
    ("num_cards", "figures", "prompt_len", "reasons"),
    [
        (1, LLAMA_8B, 2048, ()),
        (1, LLAMA_8B, 2049, ("prompt over 2,048",)),
        (4, LLAMA_8B, 1, ("number of cards",)),
        (8, replace(LLAMA_8B, weight_bytes=2, is_fp8=False), 1, ("dtype",)),
        (8, replace(LLAMA_8B, kv_bytes=2), 1, ("dtype",)),
        (4, MIXTURE, 4096, ("number of cards", "experts", "prompt over 2,048")),
    ],
)
def test_why_a_step_is_outside_of_the_published_data(num_cards, figures, prompt_len, reasons):
    assert ServingCost("gaudi2", num_cards, figures).outside_of_data(prompt_len) == reasons


def test_the_band_is_wider_outside_of_the_published_data():
    cost = ServingCost("gaudi2", 1, LLAMA_8B)
    step = cost.prefill_seconds(1, np.array([2048, 2049]))
    width = step.high / step.low
    assert width[1] > 3 * width[0]
