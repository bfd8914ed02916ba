"""Test logit_bias, allowed_token_ids, bad_words and min_tokens."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from tests.reach import table_and_mask_of
from tests.sample.helpers import (
    draws,
    make_request,
    make_state,
    reference_probs,
    repeatable,
    rows,
    sample,
)
from vllm.engine.fan_out import fan_out
from vllm.sample.constraints import BiasTable, RowConstraints
from vllm.sample.sampler import Sampler
from vllm.sample.state import SamplingState

VOCAB_SIZE = 40


def preference(*token_ids: int) -> torch.Tensor:
    """Return logits [1, V] with which a greedy request samples the first of these tokens that is
    allowed.
    """
    logits = torch.zeros(1, VOCAB_SIZE)
    for rank, token_id in enumerate(token_ids):
        logits[0, token_id] = 10.0 - rank
    return logits


def greedy(logits: torch.Tensor, output=(), **request) -> int:
    return sample([make_request(temperature=0.0, **request)], logits, [output]).token_ids.item()


def test_bias_is_added_to_the_logits():
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    bias = {0: 1.5, 7: -0.5, 39: 2.0}
    biased = logits.clone()
    for token_id, value in bias.items():
        biased[token_id] += value
    counts = np.bincount(draws(logits, 20_000, logit_bias=bias), minlength=VOCAB_SIZE)
    expected = reference_probs(biased) * 20_000
    assert expected.min() > 5
    assert chisquare(counts, expected).pvalue > 1e-3


def test_bias_forces_and_forbids():
    logits = preference(3, 4)
    assert greedy(logits, logit_bias={9: 100.0}) == 9
    assert greedy(logits, logit_bias={3: -100.0}) == 4
    assert greedy(logits, logit_bias={3: -float("inf")}) == 4
    assert greedy(logits, logit_bias={3: -1e300}) == 4
    assert greedy(logits, logit_bias={9: float("inf")}) == 9
    assert greedy(logits, logit_bias={9: 1e300}) == 9


def test_only_allowed_tokens_are_sampled():
    logits = preference(3, 4, 5)[0]
    assert set(draws(logits, 300, allowed_token_ids=[5, 8, 9], temperature=5.0)) == {5, 8, 9}
    assert greedy(logits[None], allowed_token_ids=[9, 4]) == 4
    # A logit bias cannot allow a token that allowed_token_ids excludes.
    assert greedy(logits[None], allowed_token_ids=[9, 4], logit_bias={3: 100.0}) == 4


@repeatable
@given(st.data())
def test_allowed_tokens_hold_for_their_row_only(data):
    sets = data.draw(
        st.lists(st.none() | st.sets(st.integers(0, 39), min_size=1), min_size=1, max_size=9)
    )
    logits = torch.randn(len(sets), VOCAB_SIZE, generator=torch.Generator().manual_seed(len(sets)))
    requests = [
        make_request(temperature=0.0, allowed_token_ids=None if s is None else sorted(s))
        for s in sets
    ]
    tokens = sample(requests, logits).token_ids.tolist()
    for row, (allowed, token) in enumerate(zip(sets, tokens, strict=True)):
        best = max(
            range(VOCAB_SIZE) if allowed is None else allowed, key=logits[row].tolist().__getitem__
        )
        assert token == best


def test_a_bad_word_of_one_token_is_never_sampled():
    assert greedy(preference(3, 4), bad_words=[[3]]) == 4
    assert greedy(preference(3, 4, 5), bad_words=[[3], [4]]) == 5
    assert greedy(preference(3, 4), bad_words=[[3], [3]]) == 4


@pytest.mark.parametrize(
    ("output", "token"),
    [
        ([], 3),
        ([1], 3),
        ([1, 2], 4),
        ([9, 9, 1, 2], 4),
        ([1, 2, 9], 3),
        ([2], 3),
        ([2, 1], 3),
        ([2, 2], 3),
    ],
)
def test_the_last_token_of_a_bad_word_is_banned_after_the_others(output, token):
    logits = preference(3, 4)
    assert greedy(logits, output, bad_words=[[1, 2, 3]]) == token
    assert greedy(logits, output, bad_words=[[1, 2, 3], [1, 8], []]) == token


def test_bad_words_look_at_the_output_and_not_at_the_prompt():
    assert greedy(preference(3, 4), prompt=[1, 2], bad_words=[[1, 2, 3]]) == 3
    assert greedy(preference(3, 4), [2], prompt=[1], bad_words=[[1, 2, 3]]) == 3


def test_bad_words_with_a_common_beginning_are_all_banned():
    words = [[1, 2, 3], [2, 4], [1, 2, 5], [7, 2, 6]]
    assert greedy(preference(3, 4, 5, 6), [1, 2], bad_words=words) == 6
    assert greedy(preference(3, 4, 5, 6), [7, 2], bad_words=words) == 3


@repeatable
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=6),
    st.lists(st.integers(0, 2), max_size=8),
)
def test_no_output_ever_contains_a_bad_word(words, start):
    """There are three tokens to choose from, and a request finishes when all of them are banned."""

    def holds_bad_word(text: list[int]) -> bool:
        return any(text[i : i + len(word)] == word for word in words for i in range(len(text)))

    output: list[int] = []
    for token in start:  # each token that may begin this and is allowed so far
        if not holds_bad_word([*output, token]):
            output.append(token)
    state = make_state([make_request(bad_words=words, seed=len(start))], 3, [output])
    for _ in range(12):
        metadata = state.metadata(rows(0), rows(len(output)))
        result = Sampler()(torch.zeros(1, 3), metadata)
        if result.invalid.item():
            assert all(holds_bad_word([*output, token]) for token in range(3))
            return
        state.record(rows(0), result.token_ids.numpy())
        output += result.token_ids.tolist()
        assert not holds_bad_word(output)


def test_words_outside_the_vocabulary_are_harmless():
    words = [[1000], [1, 1000], [1000, 3]]
    assert greedy(preference(3, 4), [1], bad_words=words) == 3
    assert greedy(preference(3, 4), stop=[5000], eos=4000, min_tokens=9) == 3


def test_end_tokens_are_masked_until_min_tokens_are_there():
    request = {"eos": 3, "stop": [4, 5], "min_tokens": 2}
    logits = preference(3, 4, 5, 6)
    assert greedy(logits, [], **request) == 6
    assert greedy(logits, [6], **request) == 6
    assert greedy(logits, [6, 6], **request) == 3
    assert greedy(logits, [6, 6, 6], **request) == 3


def test_min_tokens_does_not_mask_what_does_not_end_the_output():
    assert greedy(preference(3, 4), min_tokens=2) == 3, "a request that ignores eos has none"
    assert greedy(preference(3, 4), stop=[4], min_tokens=2) == 3


def test_constraints_of_one_row_do_not_reach_the_others():
    logits = preference(3, 4, 5).expand(4, -1)
    requests = [
        make_request(temperature=0.0, eos=3, min_tokens=5),
        make_request(temperature=0.0, eos=3),
        make_request(temperature=0.0, bad_words=[[3], [4]]),
        make_request(temperature=0.0, logit_bias={9: 50.0}),
    ]
    assert sample(requests, logits).token_ids.tolist() == [4, 3, 5, 9]


def test_many_biases_in_one_row_and_few_in_another():
    logits = torch.zeros(2, 1000)
    many = {t: float(t % 7) for t in range(300)}
    requests = [
        make_request(temperature=0.0, logit_bias=many),
        make_request(temperature=0.0, logit_bias={999: 1.0}),
    ]
    assert sample(requests, logits).token_ids.tolist() == [6, 999]


def test_thousands_of_bad_words_ban_what_a_search_through_all_of_them_finds():
    dice = random.Random(1)
    words = [dice.choices(range(6), k=dice.randrange(1, 7)) for _ in range(3000)]
    known = {tuple(word) for word in words}
    table = BiasTable(make_request(bad_words=words), vocab_size=6)
    row, output = RowConstraints(table, []), []
    for position in range(200):
        expected = {
            word[-1] for word in known if tuple(output[len(output) - len(word) + 1 :]) == word[:-1]
        }
        token_ids, values = row.pairs(position)
        assert set(token_ids.tolist()) == expected and np.isneginf(values).all()
        output.append(dice.randrange(6))
        row.record(output[-1])


def test_samples_of_a_request_share_their_table_and_their_mask():
    state = SamplingState(4, 64, torch.device("cpu"))
    params = {"n": 3, "logit_bias": {1: 2.0}, "allowed_token_ids": [1, 2, 3]}
    samples = fan_out(make_request(bad_words=[[5]], **params))
    for row, request in enumerate(samples):
        state.add(row, request, [])
    (table, mask), *others = (table_and_mask_of(state, row) for row in range(3))
    assert all(own_table is table and own_mask is mask for own_table, own_mask in others)
    state.add(3, make_request(bad_words=[[6]], **params), [])
    assert table_and_mask_of(state, 3)[0] is not table
