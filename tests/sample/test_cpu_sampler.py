"""Test the sampler with C++ kernels against the torch sampler, for each instruction set of this
machine.
"""

import copy
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch

from tests.loops import loop_over
from tests.sample.helpers import CPU, make_request, rows
from tests.sample.test_sampler import MIXED
from tests.sample.test_sampling_distribution import PARAMS, races_for_each
from vllm.ops.cpu.operators import load_cpu_kernels
from vllm.ops.cpu.sampling import load_sampling_kernels
from vllm.sample import cpu_sampler
from vllm.sample.cpu_sampler import CPUSampler, for_torch, make_sampler
from vllm.sample.random import exponentials_at, stream_keys
from vllm.sample.sampler import Sampler
from vllm.sample.state import SamplingState

ISAS = ["avx512_bf16", "avx512", "avx2", "base"]

pytestmark = pytest.mark.skipif(
    load_sampling_kernels() is None, reason="the C++ kernels are not built"
)


def random_logits(num_rows: int, vocab_size: int, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows + vocab_size)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def sample_with(make, requests, logits, position: int = 3, outputs=(4, 5, 8)):
    """Return the output of one step of all requests, and their state."""
    n = len(requests)
    state, sampler = make(n, logits.shape[-1], CPU)
    for row, request in enumerate(requests):
        state.add(row, request, list(outputs))
    order = np.arange(n, dtype=np.int32)
    return sampler(logits, state.metadata(order, np.full(n, position, np.int32))), state


def make_torch(num_rows: int, vocab_size: int, device: torch.device):
    return SamplingState(num_rows, vocab_size, device), Sampler()


def mixed_requests(num_rows: int, vocab_size: int):
    """Return requests with every feature, several of each with different random numbers."""
    rng = np.random.default_rng(vocab_size)
    prompts = rng.integers(0, vocab_size, (num_rows, 20)).tolist()
    return [
        make_request(prompt=prompt, seed=1000 + i, eos=2, **MIXED[i % len(MIXED)])
        for i, prompt in enumerate(prompts)
    ]


def assert_same(got, want) -> None:
    assert got.token_ids.dtype == got.host_ids.dtype == torch.int32
    assert got.token_ids.equal(want.token_ids)
    assert got.host_ids.equal(want.host_ids)
    assert got.errors == want.errors
    assert (got.logprobs is None) == (want.logprobs is None)
    if got.logprobs is not None:
        torch.testing.assert_close(got.logprobs.logprobs, want.logprobs.logprobs)
        assert got.logprobs.ranks.equal(want.logprobs.ranks)


@loop_over("dtype", [torch.float32, torch.bfloat16])
@loop_over("scale", [0.3, 8.0])
@loop_over("vocab_size", [301, 4096, 20000])
def test_tokens_are_those_of_torch(vector_isa, vocab_size, scale, dtype):
    requests = mixed_requests(4 * len(MIXED), vocab_size)
    logits = random_logits(len(requests), vocab_size, scale).to(dtype)
    before = logits.clone()
    got, _ = sample_with(make_sampler, requests, logits)
    assert_same(got, sampled_by_torch(vocab_size, scale, dtype))
    assert logits.equal(before), "the logits of the caller were written"


@cache
def sampled_by_torch(vocab_size: int, scale: float, dtype: torch.dtype):
    requests = mixed_requests(4 * len(MIXED), vocab_size)
    logits = random_logits(len(requests), vocab_size, scale).to(dtype)
    return sample_with(make_torch, requests, logits)[0]


@pytest.mark.parametrize("vocab_size", [1, 50, 127, 128, 129, 1000])
def test_greedy_is_the_first_of_the_largest_logits(vector_isa, vocab_size):
    logits = random_logits(40, vocab_size).bfloat16()
    logits[4, vocab_size // 2 :] = 100
    logits[5, :-1] = -torch.inf
    got, _ = sample_with(make_sampler, [make_request(temperature=0.0)] * 40, logits, outputs=())
    assert got.token_ids.tolist() == [row.index(max(row)) for row in logits.tolist()]


def kept_tokens(make, logits: torch.Tensor, params) -> list[int]:
    """Return the tokens that may be sampled, by sampling once for each token with random numbers
    that favour it.
    """
    vocab_size = len(logits)
    state, sampler = make(1, vocab_size, CPU)
    state.add(0, make_request(**params), [])
    first_row = np.zeros(vocab_size, np.int32)
    metadata = state.metadata(first_row, first_row)
    metadata = for_torch(metadata, vocab_size)
    metadata.exponentials.copy_(races_for_each(vocab_size))
    tokens = sampler(logits.expand(vocab_size, -1), metadata).token_ids
    return sorted(set(tokens.tolist()))


FILTERS = [p for p in PARAMS if p.keys() & {"top_k", "top_p", "min_p"}]
LOGITS = {
    "normal": random_logits(1, 700)[0],
    "of few values": random_logits(1, 700)[0].mul(2).round().div(2),
    "all equal": torch.zeros(700),
    "with -inf": torch.where(torch.arange(700) % 3 == 1, random_logits(1, 700)[0], -torch.inf),
    "ascending": torch.linspace(-3, 3, 700),
    "up and down": torch.cat([torch.linspace(-3, 3, 350), torch.linspace(3, -3, 350)]),
    "far apart": torch.cat([torch.tensor([30.0, -1e30, 29.0]), random_logits(1, 697)[0] * 20]),
    "of two signs of zero": torch.tensor([0.0, -0.0, -1.0, 1.0] * 175),
}


@loop_over("params", [*FILTERS, {"top_k": 300}, {"top_k": 300, "top_p": 0.9}])
def test_kept_tokens_are_those_that_torch_keeps(vector_isa, params):
    for name, logits in LOGITS.items():
        expected = kept_by_torch(name, *params.items())
        assert kept_tokens(make_sampler, logits, params) == expected, name


@cache
def kept_by_torch(name: str, *params: tuple[str, float]) -> list[int]:
    return kept_tokens(make_torch, LOGITS[name], dict(params))


@loop_over("params", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 3}])
@loop_over("bad", [float("nan"), float("inf"), float("-inf")])
@loop_over("dtype", [torch.float32, torch.bfloat16])
def test_bad_logits_are_flagged_and_hurt_no_other_row(vector_isa, params, bad, dtype):
    logits = random_logits(4, 300).to(dtype)
    requests = [make_request(seed=i, logprobs=2, **params) for i in range(4)]
    healthy, _ = sample_with(make_sampler, requests, logits)
    logits[1] = bad
    logits[3, 299] = torch.nan
    got, state = sample_with(make_sampler, requests, logits)
    assert got.invalid.tolist() == [False, True, False, True]
    assert got.token_ids[[0, 2]].equal(healthy.token_ids[[0, 2]])
    assert ((got.token_ids >= 0) & (got.token_ids < 300)).all()
    assert ((got.logprobs.token_ids >= 0) & (got.logprobs.token_ids < 300)).all()
    assert state.errors_of(rows(0, 1, 2, 3), got).keys() == {1, 3}


@pytest.fixture
def restored() -> Iterator[None]:
    """Restore the instruction set and the number of threads after the test."""
    library, num_threads = load_cpu_kernels(), torch.get_num_threads()
    best = library.isa
    yield
    library.set_isa(best)
    torch.set_num_threads(num_threads)


def test_neither_neighbours_nor_threads_nor_instruction_sets_change_a_token(restored):
    """The distribution is flat, so the last bit often decides."""
    vocab_size, n = 4096, 20 * len(MIXED)
    requests = mixed_requests(n, vocab_size)
    logits = random_logits(n, vocab_size, 0.3)
    want = sample_with(make_sampler, requests, logits)[0].token_ids
    torch.set_num_threads(2)
    for name in ISAS:
        if load_cpu_kernels().set_isa(name):
            assert sample_with(make_sampler, requests, logits)[0].token_ids.equal(want), name
    for i in range(0, n, 7):
        alone, _ = sample_with(make_sampler, requests[i : i + 1], logits[i : i + 1])
        assert alone.token_ids[0] == want[i]


def test_random_numbers_are_those_of_numpy_but_for_the_last_bits(vector_isa):
    keys, positions = stream_keys(np.arange(200)), np.arange(200, dtype=np.int64) * 977
    got = load_sampling_kernels().exponentials(keys, positions, 1131)
    np.testing.assert_allclose(got, exponentials_at(keys, positions, 1131), rtol=6e-7, atol=0)


def test_random_numbers_next_to_the_ends_are_exact_too(vector_isa):
    """Check log(x) for x near 1, where it is near 0, and the smallest and largest random
    numbers.
    """
    keys = stream_keys(np.arange(3000))
    positions = np.zeros(3000, np.int64)
    want = exponentials_at(keys, positions, 1000)
    got = load_sampling_kernels().exponentials(keys, positions, 1000)
    assert want.min() < 1e-6 and want.max() > 14
    rare = (want < 1e-3) | (want > 12)
    np.testing.assert_allclose(got[rare], want[rare], rtol=6e-7, atol=0)


@loop_over("num_logprobs", [0, 1, 5, 20, 300])
@loop_over("vocab_size", [7, 128, 300, 5000])
def test_logprobs_are_those_of_log_softmax(vector_isa, vocab_size, num_logprobs):
    logits = random_logits(9, vocab_size, 4.0)
    tokens = torch.arange(9) % vocab_size
    wanted = np.array([8, 0, 3], np.int64)
    kernels, k = load_sampling_kernels(), min(num_logprobs, vocab_size)
    found = kernels.gather_logprobs(logits, tokens, num_logprobs)
    reference = logits.log_softmax(-1)
    torch.testing.assert_close(found[1], reference.gather(-1, found[0].long()))
    assert found[0][:, 1:].equal(logits.topk(k).indices.int())
    assert found[0][:, 0].tolist() == tokens.tolist()
    larger = logits > logits.gather(-1, tokens[:, None])
    assert found[2].tolist() == (larger.sum(-1) + 1).tolist()
    some = kernels.gather_logprobs(logits, tokens, num_logprobs, wanted)
    assert all(part.equal(whole[wanted]) for part, whole in zip(some, found, strict=True))


def test_equal_logits_are_likeliest_in_the_order_of_their_tokens(vector_isa):
    logits = torch.tensor([[2.0, -0.0, 5.0, 5.0, 0.0, 2.0, -torch.inf]])
    ids, logprobs, ranks = load_sampling_kernels().gather_logprobs(logits, torch.tensor([5]), 7)
    assert ids[0].tolist() == [5, 2, 3, 0, 5, 1, 4, 6]
    assert ranks.tolist() == [3] and logprobs[0, -1] == -torch.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_log_probabilities_of_a_prompt_are_those_of_torch(dtype):
    logits, tokens = random_logits(9, 1000).to(dtype), torch.arange(9) * 100
    _, sampler = make_sampler(1, 1000, CPU)
    got = sampler.gather_logprobs(logits, tokens, 5)
    want = Sampler().gather_logprobs(logits, tokens, 5)
    assert got.token_ids[:, 0].tolist() == tokens.tolist()
    assert got.ranks.equal(want.ranks)
    assert got.logprobs.dtype == torch.float32
    torch.testing.assert_close(got.logprobs, want.logprobs)


def test_a_failing_logits_processor_is_an_error_of_its_row_alone():
    def fails(output, logits):
        raise RuntimeError("no")

    processors = [None, [lambda output, logits: logits * -1], None, [fails], None]
    requests = [make_request(temperature=0.0, logits_processors=p) for p in processors]
    logits = random_logits(5, 1000)
    got, _ = sample_with(make_sampler, requests, logits)
    want = logits.argmax(-1)
    want[1] = logits[1].argmin()
    assert got.token_ids.equal(want.int())
    assert got.errors.keys() == {3} and "RuntimeError: no" in got.errors[3]


def test_logits_that_kernels_do_not_read_go_to_torch():
    requests = mixed_requests(60, 1000)
    half = random_logits(60, 1000).half()
    gaps = random_logits(60, 3000)[:, ::3]
    for logits in (half, gaps, random_logits(60, 3000)[:, 500:1500], gaps[:0]):
        part = requests[: len(logits)]
        if part:
            assert_same(
                sample_with(make_sampler, part, logits)[0],
                sample_with(make_torch, part, logits)[0],
            )


def test_no_row_is_an_empty_result():
    for params in ({"temperature": 0.0}, {"logprobs": 2, "top_p": 0.5}):
        state, sampler = make_sampler(1, 50, CPU)
        state.add(0, make_request(**params), [])
        output = sampler(torch.empty(0, 50), state.metadata(rows(), rows()))
        assert output.token_ids.shape == output.invalid.shape == (0,)


@pytest.mark.parametrize(("is_built", "kind"), [(True, CPUSampler), (False, Sampler)])
def test_torch_samples_where_no_kernels_were_built(monkeypatch, is_built, kind):
    if not is_built:
        monkeypatch.setattr(cpu_sampler, "load_sampling_kernels", lambda: None)
    state, sampler = make_sampler(1, 50, CPU)
    assert type(sampler) is kind
    state.add(0, make_request(seed=3), [])
    metadata = state.metadata(rows(0), rows(0))
    assert (metadata.exponentials is None) is is_built
    assert 0 <= sampler(random_logits(1, 50), metadata).token_ids[0] < 50


def test_kernels_with_another_order_of_parameters_are_refused():
    kernels = load_sampling_kernels()
    if kernels is None:
        pytest.skip("the C++ kernels are not built")
    CPUSampler(kernels)
    other = copy.copy(kernels)
    other.params = kernels.params[::-1]
    with pytest.raises(AssertionError, match="kMinP"):
        CPUSampler(other)
