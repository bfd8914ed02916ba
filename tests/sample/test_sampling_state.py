"""Test the sampling state of requests: the metadata of a forward pass, and the state after a
preemption.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.sample.helpers import CPU, make_request, make_state, rows
from tests.sample.test_sampler import MIXED, mixed_requests, random_logits
from vllm.sample.features import Param
from vllm.sample.metadata import ALL_GREEDY
from vllm.sample.sampler import Sampler
from vllm.sample.state import SamplingState

VOCAB_SIZE = 50


def test_greedy_rows_that_ask_for_nothing_need_nothing():
    state = make_state([make_request(temperature=0.0)] * 4, VOCAB_SIZE)
    assert state.metadata(rows(0, 2, 3), rows(0, 1, 2)) is ALL_GREEDY
    # A request with random sampling elsewhere in the batch does not affect a forward pass without
    # it.
    state.remove(1)
    state.add(1, make_request(top_p=0.5), [])
    assert state.metadata(rows(0, 2, 3), rows(0, 1, 2)) is ALL_GREEDY
    assert state.metadata(rows(0, 1), rows(0, 1)) is not ALL_GREEDY


@pytest.mark.parametrize(
    ("params", "needed"),
    [
        ({}, set()),
        ({"temperature": 0.5}, {"temperature"}),
        ({"top_k": 5}, {"top_k", "max_top_k"}),
        ({"top_k": -1}, set()),
        ({"top_k": VOCAB_SIZE}, set()),
        ({"top_p": 0.5}, {"top_p"}),
        ({"min_p": 0.5}, {"min_p"}),
        ({"presence_penalty": 0.5}, {"penalties"}),
        ({"logit_bias": {1: 1.0}}, {"edits"}),
        ({"allowed_token_ids": [1]}, {"masks"}),
        ({"logprobs": 0}, {"logprobs"}),
        ({"logprobs": 3}, {"logprobs"}),
        ({"min_tokens": 3}, set()),
        ({"ignore_eos": True, "stop_token_ids": [3]}, set()),
    ],
    # The order of sets differs between processes, but test ids must not.
    ids=lambda value: str(sorted(value)),
)
def test_a_launch_gets_only_what_its_rows_use(params, needed):
    state = make_state([make_request(**params), make_request()], VOCAB_SIZE)
    metadata = state.metadata(rows(0, 1), rows(0, 0))
    optional = ("max_top_k", "penalties", "edits", "masks", "logprobs")
    given = {name for name in optional if getattr(metadata, name) is not None}
    filters = (Param.TEMPERATURE, Param.TOP_K, Param.TOP_P, Param.MIN_P)
    given |= {param.name.lower() for param in filters if metadata.param(param) is not None}
    assert given == needed
    assert metadata.all_random and not metadata.all_greedy and metadata.greedy_mask is None
    assert state.metadata(rows(1), rows(0)).changes_logits is False


def test_metadata_is_of_the_rows_in_their_order():
    requests = [
        make_request(temperature=0.5, top_k=7),
        make_request(temperature=0.0),
        make_request(temperature=2.0, top_p=0.25, min_p=0.125),
    ]
    metadata = make_state(requests, VOCAB_SIZE).metadata(rows(2, 0, 1), rows(0, 0, 0))
    assert metadata.param(Param.TEMPERATURE).tolist() == [2.0, 0.5, 1.0]
    assert metadata.top_k.tolist() == [0, 7, 0] and metadata.max_top_k == 7
    assert metadata.param(Param.TOP_P).tolist() == [0.25, 1.0, 1.0] and metadata.unbounded_top_p
    assert metadata.param(Param.MIN_P).tolist() == [0.125, 0.0, 0.0]
    assert metadata.greedy_mask.tolist() == [False, False, True]
    assert not metadata.all_greedy and not metadata.all_random


def test_random_numbers_follow_seed_and_position():
    state = make_state([make_request(seed=5), make_request(seed=5)], VOCAB_SIZE)
    first = state.metadata(rows(0, 1), rows(3, 4)).exponentials.tolist()
    assert first == state.metadata(rows(1, 0), rows(3, 4)).exponentials.tolist()
    assert first[0] != first[1]


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1, 2**64 - 1])
def test_any_seed_of_64_bits_will_do(seed):
    metadata = make_state([make_request(seed=seed)], VOCAB_SIZE).metadata(rows(0), rows(0))
    assert (metadata.exponentials > 0).all()


def generate(state, row, logits, first_step, num_steps):
    tokens = []
    for step in range(first_step, first_step + num_steps):
        output = Sampler()(logits[step : step + 1], state.metadata(rows(row), rows(step)))
        assert not output.errors
        state.record(rows(row), output.token_ids.numpy())
        tokens += output.token_ids.tolist()
    return tokens


@pytest.mark.parametrize("params", MIXED, ids=lambda p: ",".join(p) or "plain")
def test_a_preempted_request_goes_on_as_if_nothing_had_happened(params):
    logits = random_logits(20, VOCAB_SIZE).div(3)
    params = {**params}
    if "allowed_token_ids" in params:
        params["allowed_token_ids"] = [t for t in params["allowed_token_ids"] if t < VOCAB_SIZE]
    request = make_request(prompt=[1, 2, 3], seed=9, eos=2, **params)
    want = generate(make_state([request], VOCAB_SIZE), 0, logits, 0, 20)
    for stop_at in (0, 1, 7, 19):
        state = SamplingState(3, VOCAB_SIZE, CPU)
        state.add(0, request, [])
        before = generate(state, 0, logits, 0, stop_at)
        state.remove(0)
        # Another request takes row 0.
        state.add(0, make_request(repetition_penalty=2.0, bad_words=[[1]]), [5])
        state.add(2, request, before)
        assert before + generate(state, 2, logits, stop_at, 20 - stop_at) == want


def test_a_freed_row_leaves_nothing_behind():
    state = make_state(mixed_requests(VOCAB_SIZE)[:19], VOCAB_SIZE)
    for row in range(19):
        state.remove(row)
        state.add(row, make_request(temperature=0.0), [])
    assert state.metadata(np.arange(19, dtype=np.int32), np.zeros(19, np.int32)) is ALL_GREEDY
    state.record(np.arange(19, dtype=np.int32), np.zeros(19, np.int32))
    for row in range(19):
        state.remove(row)
        state.add(row, make_request(repetition_penalty=2.0, prompt=[row]), [])
    metadata = state.metadata(np.arange(19, dtype=np.int32), np.zeros(19, np.int32))
    assert metadata.penalties.token_ids.tolist() == [[row] for row in range(19)]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}], ids=["random", "plain greedy"])
def test_a_row_taken_twice_is_a_bug(params):
    state = make_state([make_request(**params)], VOCAB_SIZE)
    with pytest.raises(AssertionError, match="row 0 is already in use"):
        state.add(0, make_request(), [])
    state.remove(0)
    state.add(0, make_request(), [])


def test_selected_rows_keep_what_they_need_and_no_more():
    requests = mixed_requests(1000)
    n = len(requests)
    metadata = make_state(requests, 1000).metadata(np.arange(n, dtype=np.int32), np.zeros(n, int))
    every = np.arange(n)
    for index in range(n):
        one = metadata.select(every[index : index + 1], torch.tensor([index]))
        alone = make_state([requests[index]], 1000).metadata(rows(0), rows(0))
        alone = replace(alone, logprobs=None)
        for name in ("all_greedy", "all_random", "unbounded_top_p", "changes_logits"):
            assert getattr(one, name) == getattr(alone, name), (name, MIXED[index])
        pairs = {param.name: (one.param(param), alone.param(param)) for param in Param}
        for name in ("exponentials", "penalties", "edits"):
            pairs[name] = getattr(one, name), getattr(alone, name)
        for name, (a, b) in pairs.items():
            assert (a is None) == (b is None), (name, MIXED[index])
            if isinstance(a, torch.Tensor):
                assert a.tolist() == b.tolist()
