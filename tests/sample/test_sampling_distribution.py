"""Test the samples of random requests against the distribution that their parameters define."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from tests.exhaustive import exhaustive
from tests.sample.helpers import (
    draws,
    make_request,
    make_state,
    reference_probs,
    repeatable,
    rows,
    sample,
)
from vllm.sample.block_reductions import BLOCK_SIZE, draw, num_draws, split_blocks
from vllm.sample.buffers import Buffers
from vllm.sample.filters import nucleus_floor
from vllm.sample.random import exponentials_at, stream_keys
from vllm.sample.sampler import Sampler

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

NUM_DRAWS = 20_000

PARAMS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_k": 40, "temperature": 0.8},
    {"top_p": 0.9},
    {"top_p": 0.35},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 0.5},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 3, "top_p": 0.99},
    {"min_p": 0.02, "top_p": 0.9},
    {"min_p": 0.02, "top_k": 12, "top_p": 0.9, "temperature": 1.3},
]


def random_logits(vocab_size: int, seed: int = 0, scale: float = 1.5) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize(
    ("vocab_size", "params"),
    [
        *((50, params) for params in PARAMS),
        *((300, params) if len(params) == 2 else exhaustive(300, params) for params in PARAMS),
    ],
    ids=str,
)
def test_tokens_come_as_often_as_the_distribution_says(params, vocab_size):
    logits = random_logits(vocab_size, seed=3)
    probs = reference_probs(logits, **params)
    counts = np.bincount(draws(logits, NUM_DRAWS, seed=11, **params), minlength=vocab_size)
    assert not counts[probs == 0].any()
    expected = probs * NUM_DRAWS
    # The chi-square test needs 5 expected counts: put rarer tokens into one bin.
    common = expected >= 5
    observed = [*counts[common], counts[~common].sum()]
    wanted = [*expected[common], expected[~common].sum()]
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    if len(wanted) > 1:
        assert chisquare(observed, wanted).pvalue > 1e-3


def test_seeds_at_one_position_follow_the_distribution_too():
    logits = random_logits(50, seed=4, scale=1.0)
    requests = [make_request(seed=seed) for seed in range(NUM_DRAWS)]
    tokens = sample(requests, logits.expand(NUM_DRAWS, -1)).token_ids.numpy()
    expected = reference_probs(logits) * NUM_DRAWS
    assert expected.min() > 5
    assert chisquare(np.bincount(tokens, minlength=50), expected).pvalue > 1e-3


def races_for_each(num_tokens: int) -> torch.Tensor:
    """Return [num_tokens, K] random numbers with which row i samples token i, unless its weight is
    0.
    """
    token = torch.arange(num_tokens)
    races = torch.ones(num_tokens, num_draws(num_tokens))
    races[token, token // BLOCK_SIZE] = 1e-20
    races[token, races.shape[1] - BLOCK_SIZE + token % BLOCK_SIZE] = 1e-20
    return races


@pytest.mark.parametrize("vocab_size", [50, 700])
@pytest.mark.parametrize(
    "params", [p for p in PARAMS if p.keys() & {"top_k", "top_p", "min_p"}], ids=str
)
def test_kept_tokens_are_those_that_transformers_keeps(params, vocab_size):
    from transformers.generation import logits_process as hf

    logits = random_logits(vocab_size, seed=5, scale=1.0)
    scores = logits[None] / params.get("temperature", 1.0)
    if "min_p" in params:
        scores = hf.MinPLogitsWarper(params["min_p"])(None, scores)
    if "top_k" in params:
        scores = hf.TopKLogitsWarper(params["top_k"])(None, scores)
    if "top_p" in params:
        scores = hf.TopPLogitsWarper(params["top_p"])(None, scores)
    probs = scores[0].softmax(-1).double()

    # Use one request per token, whose random numbers choose that token if it has any probability.
    state = make_state([make_request(**params)], vocab_size)
    first_row = np.zeros(vocab_size, np.int32)
    metadata = state.metadata(first_row, first_row)
    metadata.exponentials.copy_(races_for_each(vocab_size))
    tokens = Sampler()(logits.expand(vocab_size, -1), metadata).token_ids
    assert set(tokens.tolist()) == set(probs.nonzero().flatten().tolist())


def test_min_p_comes_before_top_k_before_top_p():
    # The probabilities are 0.4, 0.3, 0.2 and 0.1. min_p removes the last token, top_k 2 leaves 4/7
    # and 3/7, and top_p 0.5 of these keeps only the first token; applied to all four tokens, top_p
    # would keep two.
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0]).log()
    assert set(draws(logits, 500, min_p=0.3, top_k=2, top_p=0.5)) == {3}
    assert set(draws(logits, 500, top_p=0.5)) == {3, 2}
    # After min_p three tokens are left, and top_p 0.75 needs two of them: 4 + 3 > 0.75 * 9. Without
    # min_p, top_p would need three.
    for top_k in (0, 4):
        assert set(draws(logits, 500, min_p=0.3, top_p=0.75, top_k=top_k)) == {3, 2}
        assert set(draws(logits, 500, top_p=0.75, top_k=top_k)) == {3, 2, 1}


@pytest.mark.parametrize("top_k", [0, 4])
def test_top_p_is_the_smallest_set_that_has_the_mass(top_k):
    shares = torch.tensor([0.5, 0.25, 0.125, 0.125, 0.0])
    assert set(draws(shares.log(), 500, top_p=0.5, top_k=top_k)) == {0}
    assert set(draws(shares.log(), 500, top_p=0.51, top_k=top_k)) == {0, 1}
    assert set(draws(shares.log(), 500, top_p=0.75, top_k=top_k)) == {0, 1}
    assert set(draws(shares.log(), 500, top_p=1e-6, top_k=top_k)) == {0}


@pytest.mark.parametrize("vocab_size", [4096, 40_960])
def test_the_threshold_of_top_p_has_the_same_bits_in_any_batch(vocab_size):
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(2))
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    padded = torch.cat([weights, torch.zeros(5, BLOCK_SIZE)], -1)
    top_p = torch.tensor([0.1, 0.5, 0.9, 0.99, 1.0])
    together = nucleus_floor(weights, top_p, vocab_size, Buffers())
    assert together.equal(nucleus_floor(padded, top_p, vocab_size, Buffers()))
    for row in range(5):
        alone = nucleus_floor(weights[row : row + 1], top_p[row : row + 1], vocab_size, Buffers())
        assert together[row].equal(alone[0])


def test_min_p_is_a_share_of_the_likeliest_after_temperature():
    # Probabilities relative to the most likely token: e**-2, e**-1, 1.
    logits = torch.tensor([0.0, 1.0, 2.0])
    assert set(draws(logits, 500, min_p=0.2)) == {1, 2}
    assert set(draws(logits, 500, min_p=0.2, temperature=2.0)) == {0, 1, 2}
    assert set(draws(logits, 500, min_p=0.2, temperature=0.5)) == {2}
    assert set(draws(logits, 500, min_p=1.0)) == {2}


def test_tokens_that_tie_at_the_edge_are_all_kept():
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    assert set(draws(logits, 2000, top_k=2)) == {1, 2, 3, 4}
    assert set(draws(logits, 2000, top_p=0.5)) == {1, 2, 3, 4}
    assert set(draws(logits, 2000, top_k=3, top_p=0.7)) == {1, 2, 3, 4}
    assert set(draws(torch.zeros(9), 2000, top_p=0.1)) == set(range(9))


def test_top_k_of_one_is_the_first_of_the_likeliest_tokens():
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, 0.0])
    assert set(draws(logits, 200, top_k=1)) == {1}


@pytest.mark.parametrize("top_k", [300, 127, 128, 129, 100_000])
def test_top_k_may_be_large(top_k):
    logits = random_logits(300, seed=6, scale=0.2)
    allowed = set(logits.topk(min(top_k, 300)).indices.tolist())
    assert set(draws(logits, NUM_DRAWS, top_k=top_k)) == allowed


def test_top_k_looks_only_at_promising_blocks_and_still_finds_all():
    """If top_k is small and the vocabulary large, only some blocks are searched."""
    logits = random_logits(20_000, seed=7, scale=0.1)
    # Several of the best tokens are in one block.
    best = torch.tensor([5, 6, 7, 130, 9_999, 19_990, 19_999])
    logits[best] += 3
    assert set(draws(logits, 300, top_k=7)) == set(best.tolist())
    assert set(draws(logits, 300, top_k=7, top_p=0.99)) == set(best.tolist())


@pytest.mark.parametrize("params", [{"temperature": 1e30}, {"temperature": 1e300}], ids=str)
def test_a_huge_temperature_is_uniform_over_what_is_allowed(params):
    logits = random_logits(10) * 100
    logits[3] = -torch.inf
    counts = np.bincount(draws(logits, 9_000, **params), minlength=10)
    assert counts[3] == 0
    assert chisquare(np.delete(counts, 3)).pvalue > 1e-3


def test_the_lowest_temperature_does_not_overflow():
    logits = torch.tensor([-30_000.0, 30_000.0, 29_000.0])
    assert set(draws(logits, 100, temperature=0.01)) == {1}


@repeatable
@given(st.data())
def test_a_token_without_probability_is_never_drawn(data):
    """This holds for any weights, even if quotients underflow or all weights except one are 0."""
    width = data.draw(st.integers(1, 3)) * BLOCK_SIZE
    positive = data.draw(st.lists(st.integers(0, width - 1), min_size=1, max_size=20))
    values = data.draw(
        st.lists(st.floats(2**-126, 1, width=32), min_size=len(positive), max_size=len(positive))
    )
    weights = torch.zeros(1, width)
    weights[0, positive] = torch.tensor(values)
    races = races_for_each(width)
    found = draw(split_blocks(weights.expand(len(races), -1)), races)
    assert (weights[0, found] > 0).all()
    slow = torch.full((1, num_draws(width)), 16.6)
    assert weights[0, draw(split_blocks(weights), slow)] > 0


def test_a_draw_follows_the_weights_over_several_blocks():
    weights = torch.rand(1, 3 * BLOCK_SIZE, generator=torch.Generator().manual_seed(8)) + 0.05
    num_rows = 60_000
    keys = stream_keys(np.arange(num_rows))
    exponentials = exponentials_at(keys, np.zeros(num_rows), num_draws(weights.shape[-1]))
    found = draw(split_blocks(weights.expand(num_rows, -1)), torch.from_numpy(exponentials))
    expected = (weights[0] / weights.sum()).double().numpy() * num_rows
    observed = np.bincount(found.numpy(), minlength=len(expected))
    assert chisquare(observed, expected / expected.sum() * num_rows).pvalue > 1e-3


def test_rounding_errors_of_the_logits_rarely_change_the_draw():
    """The rounding of logits depends on the batch size, but a seeded request should keep its
    tokens.
    """
    generator = torch.Generator().manual_seed(4)
    num_rows, width = 2000, 32 * BLOCK_SIZE
    logits = torch.randn(num_rows, width, generator=generator)
    noise = 1 + 1e-6 * torch.randn(num_rows, width, generator=generator)
    keys = stream_keys(np.arange(num_rows))
    races = torch.from_numpy(exponentials_at(keys, np.zeros(num_rows), num_draws(width)))
    exact, noisy = (
        draw(split_blocks(values), races) for values in (logits.exp(), logits.exp() * noise)
    )
    assert (exact != noisy).sum() <= 1


def test_forbidden_tokens_of_the_model_are_never_sampled():
    """A model may set the logits of unused tokens to -inf itself."""
    logits = random_logits(200, seed=9)
    logits[::2] = -torch.inf
    for params in ({}, {"top_p": 0.95}, {"top_k": 150}, {"min_p": 0.01}, {"temperature": 0.0}):
        assert (draws(logits, 500, **params) % 2 == 1).all()


def test_a_row_samples_again_what_it_sampled_at_that_position():
    logits = random_logits(50, seed=10)
    state = make_state([make_request(seed=1), make_request(seed=1), make_request(seed=2)], 50)
    first, again, other = (
        Sampler()(
            logits.expand(100, -1),
            state.metadata(np.full(100, row, np.int32), np.arange(100, dtype=np.int32)),
        ).token_ids.tolist()
        for row in (0, 1, 2)
    )
    assert first == again != other
    single = Sampler()(logits[None], state.metadata(rows(0), rows(57))).token_ids
    assert single.item() == first[57]
