"""Test penalties against loops in plain Python and against transformers."""

import random

import numpy as np
import pytest
import torch

from tests.sample.helpers import make_request, make_state, rows, sample
from vllm.sample.block_reductions import padded_copy
from vllm.sample.buffers import Buffers
from vllm.sample.penalties import TokenCounts

VOCAB_SIZE = 60


def penalised(state, logits: torch.Tensor, num_done: int = 0) -> torch.Tensor:
    """Return the logits [n, V] of requests 0..n-1 after penalties, without other features."""
    n = len(logits)
    metadata = state.metadata(np.arange(n, dtype=np.int32), np.full(n, num_done, np.int32))
    copy = padded_copy(logits, Buffers())
    metadata.penalties.apply(copy, metadata.params)
    assert (copy[:, VOCAB_SIZE:] == -torch.inf).all(), "padding stays no token"
    return copy[:, :VOCAB_SIZE]


def reference(logits, prompt, output, presence=0.0, frequency=0.0, repetition=1.0):
    """Compute penalties token by token."""
    result = []
    for token, logit in enumerate(logits):
        count = sum(1 for t in output if t == token)
        if count > 0 or token in prompt:
            logit = logit / repetition if logit > 0 else logit * repetition
        logit -= frequency * count
        if count > 0:
            logit -= presence
        result.append(logit)
    return result


PENALTIES = [
    {"presence_penalty": 0.7},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.3},
    {"frequency_penalty": -1.1},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.7},
]


@pytest.mark.parametrize("params", PENALTIES, ids=str)
def test_a_penalty_is_what_a_loop_over_the_vocabulary_computes(params):
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 30))] for _ in range(4)]
    outputs = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 90))] for _ in range(4)]
    state = make_state([make_request(prompt=p, **params) for p in prompts], VOCAB_SIZE, outputs)
    short = {name.removesuffix("_penalty"): value for name, value in params.items()}
    for step in range(5):
        logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(step)) * 3
        got = penalised(state, logits)
        want = [reference(logits[i].tolist(), prompts[i], outputs[i], **short) for i in range(4)]
        torch.testing.assert_close(got, torch.tensor(want), rtol=1e-5, atol=1e-5)
        new = [rng.randrange(VOCAB_SIZE) for _ in range(4)]
        state.record(rows(0, 1, 2, 3), rows(*new))
        for output, token in zip(outputs, new, strict=True):
            output.append(token)


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_repetition_is_that_of_transformers(penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    rng = np.random.default_rng(2)
    sequence = rng.integers(0, VOCAB_SIZE, 40)
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    want = RepetitionPenaltyLogitsProcessor(penalty)(torch.from_numpy(sequence)[None], logits)
    request = make_request(prompt=sequence[:25].tolist(), repetition_penalty=penalty)
    got = penalised(make_state([request], VOCAB_SIZE, [sequence[25:].tolist()]), logits)
    torch.testing.assert_close(got, want)


def test_presence_and_frequency_ignore_the_prompt():
    logits = torch.zeros(1, VOCAB_SIZE)
    request = make_request(prompt=[7, 7, 8], presence_penalty=1.0, frequency_penalty=1.0)
    assert penalised(make_state([request], VOCAB_SIZE), logits).equal(logits)


@pytest.mark.parametrize("static_shapes", [False, True])
def test_a_row_that_has_generated_all_tokens_goes_on_with_drafts(static_shapes):
    request = make_request(frequency_penalty=1.0)
    output = [token for token in range(VOCAB_SIZE) if token != 7]
    state = make_state([request], VOCAB_SIZE, [output], static_shapes=static_shapes)
    metadata = state.metadata(rows(0, 0, 0), rows(0, 1, 2), None, {0: [5, 7]})
    logits = padded_copy(torch.zeros(3, VOCAB_SIZE), Buffers())
    metadata.penalties.apply(logits, metadata.params)
    places = [reference([0.0] * VOCAB_SIZE, [], [*output, *more], frequency=1.0)
              for more in ([], [5], [5, 7])]  # fmt: skip
    assert logits[:, :VOCAB_SIZE].tolist() == places


def test_forbidden_tokens_stay_forbidden():
    logits = torch.full((1, VOCAB_SIZE), -torch.inf)
    request = make_request(prompt=[1, 2], repetition_penalty=1.5, frequency_penalty=-2.0)
    assert penalised(make_state([request], VOCAB_SIZE, [[2, 3]]), logits).equal(logits)


def test_rows_without_a_penalty_are_left_alone():
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(4))
    requests = [
        make_request(prompt=[1, 2, 3]),
        make_request(prompt=[1, 2, 3], repetition_penalty=2.0),
        make_request(prompt=[1, 2, 3], temperature=0.0),
    ]
    got = penalised(make_state(requests, VOCAB_SIZE, [[4], [4], [4]]), logits)
    assert got[[0, 2]].equal(logits[[0, 2]])
    assert (got[1] != logits[1]).nonzero().flatten().tolist() == [1, 2, 3, 4]


def test_a_greedy_row_stops_to_repeat_itself():
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, :4] = torch.tensor([1.0, 0.9, 0.8, 0.7])
    request = make_request(temperature=0.0, frequency_penalty=0.15)
    output: list[int] = []
    for _ in range(4):
        output += sample([request], logits, [output]).token_ids.tolist()
    assert output == [0, 1, 0, 2]


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_extreme_repetition_penalties_do_not_overflow(penalty):
    logits = torch.tensor([[-1.0, 0.0, 2.0, 1.0]])
    output = sample([make_request(prompt=[0, 1, 2], repetition_penalty=penalty)], logits)
    assert not output.invalid.any()


def test_counts_grow_with_the_text_and_are_forgotten_with_the_row():
    counts = TokenCounts(2, vocab_size=1000)
    counts.add(0, [5, 5, 6], [6, 6, 7])
    for token in range(500):
        counts.record(0, token)
    token_ids, values = counts.gather(rows(0, 1), 500)
    assert dict(zip(token_ids[0].tolist(), values[0].tolist(), strict=True)) == {
        t: 1 + {6: 2, 7: 1}.get(t, 0) for t in range(500)
    }
    assert (token_ids[1] == 1000).all() and not values[1].any()
    counts.remove(0)
    token_ids, values = counts.gather(rows(0), 500)
    assert (token_ids == 1000).all() and not values.any()
    assert counts.max_distinct([0, 1]) == 0
