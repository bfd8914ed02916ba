"""Test log-probabilities of the model's own distribution."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.loops import loop_over
from tests.sample.helpers import make_request, make_state, repeatable, rows, sample
from vllm.sample.logprobs import gather_logprobs
from vllm.sample.sampler import Sampler


def random_logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(5)) * 4


@loop_over("dtype", [torch.float32, torch.bfloat16])
@loop_over("vocab_size", [7, 50, 128, 300, 5000])
@loop_over("num_logprobs", [0, 1, 5, 20])
def test_they_are_those_of_log_softmax(num_logprobs, vocab_size, dtype):
    logits = random_logits(9, vocab_size).to(dtype)
    tokens = torch.arange(9) % vocab_size
    k = min(num_logprobs, vocab_size)
    token_ids, logprobs, ranks = gather_logprobs(logits, tokens, num_logprobs)
    assert token_ids.shape == logprobs.shape == (9, 1 + k) and ranks.shape == (9,)
    assert (token_ids.dtype, logprobs.dtype, ranks.dtype) == (
        torch.int32,
        torch.float32,
        torch.int32,
    )
    reference = logits.float().log_softmax(-1)
    torch.testing.assert_close(logprobs, reference.gather(-1, token_ids.long()))
    torch.testing.assert_close(logprobs[:, 1:], reference.topk(k).values)
    assert token_ids[:, 0].tolist() == tokens.tolist()
    assert all(len(set(row[1:])) == k for row in token_ids.tolist())
    larger = logits > logits.gather(-1, tokens[:, None])
    assert ranks.tolist() == (larger.sum(-1) + 1).tolist()


def test_tokens_that_tie_share_the_better_rank():
    logits = torch.tensor([[2.0, 5.0, 5.0, 1.0, 2.0, 2.0, 0.0]]).expand(7, -1)
    ranks = gather_logprobs(logits, torch.arange(7), 0).ranks
    assert ranks.tolist() == [3, 1, 1, 6, 3, 3, 7]


def test_near_logits_do_not_tie():
    logits = torch.full((2, 200), -50.0)
    logits[:, 150], logits[:, 3] = 0.25, 0.25 + 2**-25
    found = gather_logprobs(logits, torch.tensor([150, 3]), 2)
    assert found.ranks.tolist() == [2, 1]
    assert found.token_ids[:, 1:].tolist() == [[3, 150], [3, 150]]


@repeatable
@given(st.integers(1, 40), st.integers(1, 400))
def test_passes_over_the_rows_change_nothing(num_rows, pass_elements):
    logits = random_logits(num_rows, 60)
    tokens = torch.arange(num_rows) % 60
    want = gather_logprobs(logits, tokens, 3, pass_elements=None)
    got = gather_logprobs(logits, tokens, 3, pass_elements=pass_elements)
    assert all(a.equal(b) for a, b in zip(want, got, strict=True))


def test_impossible_tokens_have_a_logprob_of_minus_infinity():
    logits = torch.tensor([[0.0, -torch.inf, 0.0]])
    found = gather_logprobs(logits, torch.tensor([1]), 3)
    assert found.logprobs[0, 0] == -torch.inf
    torch.testing.assert_close(found.logprobs[0, 1:3].exp(), torch.tensor([0.5, 0.5]))
    assert found.ranks.tolist() == [3]


def test_sampling_parameters_do_not_change_them():
    logits = random_logits(1, 50)
    params = {"temperature": 0.3, "top_k": 2, "logit_bias": {7: 30.0}, "repetition_penalty": 2.0}
    output = sample([make_request(logprobs=4, **params)], logits)
    assert output.token_ids.tolist() == [7]
    reference = logits.log_softmax(-1)[0]
    torch.testing.assert_close(output.logprobs.logprobs[0, 0], reference[7])
    torch.testing.assert_close(output.logprobs.logprobs[0, 1:], reference.topk(4).values)


@pytest.mark.parametrize("static_shapes", [False, True])
def test_each_row_gets_as_many_as_it_asked_for(static_shapes):
    wanted = [None, 3, None, 0, 7, None]
    requests = [make_request(seed=i, logprobs=k) for i, k in enumerate(wanted)]
    state = make_state(requests, 50, static_shapes=static_shapes)
    order = rows(4, 0, 3, 1, 2)
    logits = random_logits(5, 50)
    output = Sampler()(logits, state.metadata(order, rows(0, 0, 0, 0, 0)))
    found = state.logprob_rows(order, output)
    assert list(found) == [4, 3, 1]
    reference = logits.log_softmax(-1).numpy()
    for index, row in enumerate(order.tolist()):
        if wanted[row] is None:
            continue
        entry = found[row]
        assert entry.token_ids.shape == entry.logprobs.shape == (1, 1 + wanted[row])
        assert entry.ranks.shape == (1,)
        assert entry.token_ids[0, 0] == output.token_ids[index]
        assert (
            entry.token_ids[0, 1:].tolist() == (-reference[index]).argsort()[: wanted[row]].tolist()
        )
        np.testing.assert_allclose(
            entry.logprobs[0], reference[index][entry.token_ids[0]], rtol=1e-5, atol=1e-5
        )
        assert (entry.token_ids.dtype, entry.logprobs.dtype) == (np.int32, np.float32)


def test_nobody_asks_and_nothing_is_computed():
    state = make_state([make_request(), make_request(temperature=0.0)], 50)
    output = Sampler()(random_logits(2, 50), state.metadata(rows(0, 1), rows(0, 0)))
    assert output.logprobs is None
    assert state.logprob_rows(rows(0, 1), output) == {}
