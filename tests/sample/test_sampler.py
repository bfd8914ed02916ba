"""Test greedy requests, invalid logits, mixed batches, and the tensors of a device with static
shapes.
"""

import random
from dataclasses import fields, is_dataclass

import numpy as np
import pytest
import torch

from tests.loops import loop_over
from tests.sample.helpers import make_request, make_state, rows, sample
from vllm.sample.sampler import Sampler
from vllm.sample.state import SamplingState

MIXED = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {},
    {"temperature": 0.7},
    {"temperature": 1.5, "logprobs": 3},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": 60, "temperature": 0.5},
    {"top_k": 700},
    {"top_p": 0.7},
    {"top_p": 0.95, "temperature": 1.3},
    {"top_k": 30, "top_p": 0.8},
    {"top_k": 500, "top_p": 0.9},
    {"min_p": 0.05},
    {"min_p": 0.01, "top_k": 20, "top_p": 0.9},
    {"min_p": 0.001, "top_p": 0.9},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -1.0, "top_p": 0.9},
    {"repetition_penalty": 1.2, "top_k": 10},
    {"logit_bias": {3: 5.0, 7: -100.0}},
    {"logit_bias": {0: 2.0}, "temperature": 0.0, "logprobs": 0},
    {"allowed_token_ids": [1, 5, 9, 300]},
    {"allowed_token_ids": list(range(100)), "top_p": 0.5},
    {"min_tokens": 10, "top_k": 50},
    {"bad_words": [[5], [6, 7], [8, 9, 10]], "temperature": 0.8},
    {"logits_processors": [lambda output, logits: logits * 0.5]},
]


def mixed_requests(vocab_size: int):
    rng = random.Random(0)
    return [
        make_request(
            prompt=[rng.randrange(vocab_size) for _ in range(20)],
            seed=100 + i,
            eos=2,
            **params,
        )
        for i, params in enumerate(MIXED)
    ]


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 50, 127, 128, 129, 1000])
def test_greedy_is_the_first_of_the_largest_logits(vocab_size, dtype):
    logits = random_logits(40, vocab_size).to(dtype)
    logits[3] = 0.5
    logits[4, vocab_size // 2 :] = 100
    logits[5, :-1] = -torch.inf
    output = sample([make_request(temperature=0.0)] * 40, logits)
    assert output.token_ids.tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert output.token_ids.dtype == torch.int32
    assert not output.invalid.any()


@pytest.mark.parametrize("pass_elements", [None, 2**16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_rows_of_a_mixed_batch_take_the_largest_logit(pass_elements, dtype):
    logits = random_logits(90, 1100).to(dtype)
    # A token in another block has the same largest logit.
    logits[:, 1099] = logits[:, :1099].max(-1).values
    params = [{"temperature": 0.0}, {"top_p": 0.9}, {"temperature": 2.0, "top_k": 50}]
    requests = [make_request(seed=i, **params[i % 3]) for i in range(90)]
    tokens = sample(requests, logits, pass_elements=pass_elements).token_ids
    assert tokens[::3].tolist() == [row.index(max(row)) for row in logits[::3].tolist()]


@pytest.mark.parametrize("vocab_size", [1000, 4096, 5000])
@pytest.mark.parametrize("pass_elements", [None, 2**14, 2**20])
def test_a_row_samples_the_same_alone_and_in_any_crowd(pass_elements, vocab_size):
    """Each feature runs next to each other feature, over several steps, in changing order, in one
    pass and in several.
    """
    n = len(MIXED)
    requests = mixed_requests(vocab_size)
    crowd = make_state(requests, vocab_size)
    alone = [make_state([request], vocab_size) for request in requests]
    sampler = Sampler(pass_elements)
    rng = np.random.default_rng(0)
    for step in range(7):
        logits = random_logits(n, vocab_size, seed=step)
        order = rng.permutation(n)[: n - step % 3].astype(np.int32)
        done = np.full(len(order), step, np.int32)
        together = sampler(logits[torch.from_numpy(order).long()], crowd.metadata(order, done))
        assert not together.errors
        for index, row in enumerate(order.tolist()):
            single = Sampler()(logits[row : row + 1], alone[row].metadata(rows(0), rows(step)))
            assert together.token_ids[index] == single.token_ids[0], MIXED[row]
            alone[row].record(rows(0), single.token_ids.numpy())
        crowd.record(order, together.token_ids.numpy())


@pytest.mark.parametrize("pass_elements", [None, 2**16])
@pytest.mark.parametrize(
    "params", [{}, {"top_p": 0.9}, {"top_k": 100, "top_p": 0.95}, {"min_p": 1e-3}], ids=str
)
def test_neighbours_do_not_even_change_the_rounding(params, pass_elements):
    """The distribution over 4096 tokens is flat, so the last bit often decides between two
    tokens.
    """
    vocab_size, num_draws = 4096, 500
    crowd = make_state([make_request(seed=7, **params), *mixed_requests(vocab_size)], vocab_size)
    alone = make_state([make_request(seed=7, **params)], vocab_size)
    logits = random_logits(1, vocab_size).div(4).expand(num_draws, -1)
    positions = np.arange(num_draws, dtype=np.int32)
    want = Sampler()(logits, alone.metadata(np.zeros(num_draws, np.int32), positions))
    order = np.zeros(num_draws, np.int32)
    order[5 : 5 + len(MIXED)] = 1 + np.arange(len(MIXED))
    got = Sampler(pass_elements)(logits, crowd.metadata(order, positions))
    same = torch.from_numpy(order == 0)
    assert got.token_ids[same].equal(want.token_ids[same])


@pytest.mark.parametrize("vocab_size", [1000, 4096])
def test_static_shapes_and_padding_rows_change_no_token(vocab_size):
    n = len(MIXED)
    requests = mixed_requests(vocab_size)
    logits = random_logits(n + 6, vocab_size)
    order, done = np.arange(n, dtype=np.int32), np.full(n, 3, np.int32)
    outputs = [[4, 5, 8]] * n
    plain = make_state(requests, vocab_size, outputs).metadata(order, done)
    padded = make_state(requests, vocab_size, outputs, static_shapes=True).metadata(
        order, done, padded_size=n + 6
    )
    want = Sampler()(logits[:n], plain)
    got = Sampler(pass_elements=None)(logits, padded)
    assert got.token_ids.shape == (n + 6,)
    assert got.token_ids[:n].equal(want.token_ids)
    assert got.token_ids[n:].equal(logits[n:].argmax(-1).int())


@loop_over("params", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 3}])
@loop_over("bad", [float("nan"), float("inf"), float("-inf")])
@loop_over("vocab_size", [300, 384])
def test_bad_logits_are_flagged_and_hurt_no_other_row(params, bad, vocab_size):
    logits = random_logits(4, vocab_size)
    healthy = logits[[0, 2]].clone()
    logits[1] = bad
    logits[3, 150] = torch.nan
    requests = [make_request(seed=i, **params) for i in range(4)]
    state = make_state(requests, vocab_size)
    output = Sampler()(logits, state.metadata(rows(0, 1, 2, 3), rows(0, 0, 0, 0)))
    assert output.invalid.tolist() == [False, True, False, True]
    assert ((output.token_ids >= 0) & (output.token_ids < vocab_size)).all()
    assert "NaN" in state.errors_of(rows(0, 1, 2, 3), output)[1]
    assert state.errors_of(rows(0, 1, 2, 3), output).keys() == {1, 3}
    alone = sample([requests[0], requests[2]], healthy)
    assert output.token_ids[[0, 2]].equal(alone.token_ids)


def test_a_row_that_may_sample_nothing_is_an_error_of_its_own():
    requests = [
        make_request(allowed_token_ids=[2], min_tokens=5, eos=2),
        make_request(allowed_token_ids=[2], min_tokens=0, eos=2),
    ]
    output = sample(requests, random_logits(2, 50))
    assert output.invalid.tolist() == [True, False]
    assert output.token_ids[1] == 2


@pytest.mark.parametrize("vocab_size", [1000, 4096])
def test_logits_of_the_caller_are_never_written(vocab_size):
    requests = mixed_requests(vocab_size)
    logits = random_logits(len(requests), vocab_size)
    before = logits.clone()
    for pass_elements in (None, 2**14):
        sample(requests, logits, pass_elements=pass_elements)
        assert logits.equal(before)


def test_an_output_stays_as_it_is_when_the_sampler_is_used_again():
    sampler = Sampler()
    state = make_state([make_request(seed=i, top_p=0.9, logprobs=5) for i in range(40)], 3000)
    metadata = state.metadata(np.arange(40, dtype=np.int32), np.zeros(40, np.int32))
    first = sampler(random_logits(40, 3000, seed=1), metadata)
    tensors = [first.token_ids, first.invalid, *first.logprobs]
    before = [tensor.clone() for tensor in tensors]
    sampler(random_logits(40, 3000, seed=2), metadata)
    assert all(a.equal(b) for a, b in zip(before, tensors, strict=True))


def test_logits_may_be_a_view_with_gaps():
    wide = random_logits(20, 3000)
    view = wide[::2, 500:2500]
    for params in ({"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.5, "logprobs": 2}):
        requests = [make_request(seed=i, **params) for i in range(10)]
        got, want = sample(requests, view), sample(requests, view.contiguous())
        assert got.token_ids.equal(want.token_ids)


def test_no_row_is_an_empty_result():
    for params in ({"temperature": 0.0}, {"logprobs": 2, "top_p": 0.5}):
        state = make_state([make_request(**params)], 50)
        output = Sampler()(torch.empty(0, 50), state.metadata(rows(), rows()))
        assert output.token_ids.shape == (0,) and output.logprobs is None


def test_sampling_never_reads_a_value_back_from_the_device():
    """Tensors on the meta device have no values, so an operator that reads one raises."""
    vocab_size = 1000
    requests = [r for r in mixed_requests(vocab_size) if not r.sampling_params.logits_processors]
    n = len(requests)
    for pass_elements in (None, 2**14):
        state = SamplingState(n, vocab_size, torch.device("meta"), static_shapes=True)
        for row, request in enumerate(requests):
            state.add(row, request, [3, 4])
        metadata = state.metadata(np.arange(n, dtype=np.int32), np.full(n, 2, np.int32), 32)
        logits = torch.empty(32, vocab_size, device="meta", dtype=torch.bfloat16)
        output = Sampler(pass_elements)(logits, metadata)
        assert output.token_ids.shape == output.invalid.shape == (32,)
        assert output.token_ids.device.type == "meta"


def shapes_of(value) -> dict[str, object]:
    """Return the shapes of all tensors, and the host fields that determine the operators."""
    if isinstance(value, torch.Tensor):
        return {"": tuple(value.shape)}
    if is_dataclass(value):
        return {
            f"{f.name}.{key}": shape
            for f in fields(value)
            for key, shape in shapes_of(getattr(value, f.name)).items()
        }
    if isinstance(value, tuple):
        return {f"{i}{key}": s for i, v in enumerate(value) for key, s in shapes_of(v).items()}
    return {} if isinstance(value, np.ndarray) else {"": value}


def test_like_requests_of_other_sizes_have_the_same_static_shapes():
    def metadata(count: int, length: int, top_k: int):
        requests = [
            make_request(
                prompt=range(length),
                top_k=top_k,
                top_p=0.9,
                repetition_penalty=1.1,
                logit_bias=dict.fromkeys(range(top_k), 1.0),
                allowed_token_ids=[1, 2],
                logprobs=count,
            )
            for _ in range(count)
        ]
        state = make_state(requests, 1000, static_shapes=True)
        return state.metadata(np.arange(count, dtype=np.int32), np.zeros(count, np.int32), 16)

    assert shapes_of(metadata(5, 70, 9)) == shapes_of(metadata(8, 128, 16))
    assert shapes_of(metadata(5, 70, 9)) != shapes_of(metadata(9, 70, 9))
