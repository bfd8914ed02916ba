"""Test sampling on a device that compiles for each shape: the warm-up is finite, and nothing
compiles afterwards.
"""

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gaudi_sim.bridge import SimBridge
from tests.sample.helpers import CPU, make_request, make_state, repeatable, rows
from vllm.messages import EngineRequest
from vllm.sample.features import Feature
from vllm.sample.sampler import Sampler, SamplerOutput
from vllm.sample.state import SamplingState
from vllm.sample.static_shapes import (
    FILTERED,
    FILTERED_LARGE,
    GREEDY,
    RANDOM,
    StaticShapes,
    canonical,
    class_of,
    size_classes,
)
from vllm.sample.warmup import (
    basic_launches,
    heaviest_launch,
    stages_of,
    warmup_launches,
)
from vllm.worker.hpu.launches.host_buffers import HostBuffers

VOCAB_SIZE = 600
MAX_MODEL_LEN = 200
MAX_LOGPROBS = 20
NUM_ROWS = 4
TYPICAL = StaticShapes(vocab_size=128_256, max_model_len=8192, max_logprobs=20)

MAYBE = {
    "temperature": [0.0, 0.6, 1.7],
    "top_k": [1, 3, 128, 129, 599],
    "top_p": [0.2, 0.9],
    "min_p": [0.01, 0.3],
    "presence_penalty": [0.7],
    "frequency_penalty": [-0.4, 0.4],
    "repetition_penalty": [1.3],
    "logit_bias": [{3: 5.0, 7: -100.0}, dict.fromkeys(range(0, 600, 3), 1.5)],
    "bad_words": [[[5], [6, 7], [8, 9, 10]], [[t] for t in range(80)]],
    "min_tokens": [40],
    "allowed_token_ids": [[2, 5, 9], list(range(100, 400))],
    "logprobs": [0, 3, 20],
}


def random_request(rng: np.random.Generator) -> EngineRequest:
    """Return a request with random parameters. The probability of each parameter differs by
    request, so some requests are plain.
    """
    share = rng.choice([0.0, 0.15, 0.5])
    names = [name for name in MAYBE if rng.random() < share]
    chosen = {name: MAYBE[name][rng.integers(len(MAYBE[name]))] for name in names}
    prompt = rng.integers(0, VOCAB_SIZE, rng.integers(1, 100)).tolist()
    return make_request(prompt=prompt, seed=int(rng.integers(2**32)), eos=2, **chosen)


def num_recipes(shapes: StaticShapes, padded_size: int) -> int:
    """Return how many recipes a batch of `padded_size` requests compiles in lazy mode: a sum over
    the stages.
    """
    limits = (shapes.max_edits, padded_size, shapes.max_penalties, shapes.max_likeliest)
    start = 1
    return start + sum(len(size_classes(limit)) for limit in limits) + 2 * len(shapes.kinds)


def static_state(device: torch.device, num_rows: int = NUM_ROWS, **sizes: Any) -> SamplingState:
    sizes = {"max_model_len": MAX_MODEL_LEN, "max_logprobs": MAX_LOGPROBS, **sizes}
    vocab_size = sizes.pop("vocab_size", VOCAB_SIZE)
    return SamplingState(num_rows, vocab_size, device, static_shapes=True, **sizes)


def random_logits(rng: np.random.Generator, num_rows: int) -> torch.Tensor:
    values = rng.normal(scale=2.0, size=(num_rows, VOCAB_SIZE)).astype(np.float32)
    return torch.from_numpy(values).bfloat16()


def warm_up(bridge: SimBridge, state: SamplingState, padded_size: int) -> Sampler:
    """Compile all stages for bfloat16 logits of this many requests."""
    sampler = Sampler(pass_elements=None, end_stage=bridge.mark_step)
    logits = bridge.zeros((padded_size, state.shapes.vocab_size), torch.bfloat16)
    for launch in warmup_launches(state, padded_size):
        sampler(logits, launch)
    return sampler


@pytest.fixture
def lazy():
    with torch.inference_mode():
        yield SimBridge("gaudi2", is_lazy=True, is_strict=True)


class Mixture:
    """Random requests at some indices of a padded batch; the other indices are padding."""

    def __init__(self, rng: np.random.Generator, padded_size: int, padding_row: int) -> None:
        n = int(rng.integers(1, padded_size + 1))
        self.places = np.sort(rng.permutation(padded_size)[:n])
        self.requests = [random_request(rng) for _ in range(n)]
        self.outputs = [rng.integers(0, VOCAB_SIZE, rng.integers(0, 80)).tolist() for _ in range(n)]
        self.logits = random_logits(rng, padded_size)
        self.order = np.arange(n, dtype=np.int32)
        self.done = np.array([len(output) for output in self.outputs], np.int32)
        self.launch = np.full(padded_size, padding_row, np.int32)
        self.launch[self.places] = self.order
        self.launch_done = np.zeros(padded_size, np.int32)
        self.launch_done[self.places] = self.done

    def check(self, state: SamplingState, got: SamplerOutput) -> None:
        """Check that `got` equals the result for these requests on a CPU."""
        plain = make_state(self.requests, VOCAB_SIZE, self.outputs)
        logits = self.logits[torch.from_numpy(self.places)]
        want = Sampler()(logits, plain.metadata(self.order, self.done))
        host_ids = got.host_ids.cpu().numpy()
        assert host_ids[self.places].tolist() == want.host_ids.tolist(), self.requests
        assert state.errors_of(self.launch, got, host_ids) == plain.errors_of(self.order, want)
        found, wanted = state.logprob_rows(self.launch, got), plain.logprob_rows(self.order, want)
        assert list(found) == list(wanted)
        for row, entry in found.items():
            assert entry.ranks.tolist() == wanted[row].ranks.tolist()
            np.testing.assert_allclose(entry.logprobs, wanted[row].logprobs, rtol=1e-5, atol=1e-5)
            # Tokens with equal logits may be in any order.
            logits_of = logits[row].float().numpy()
            assert (logits_of[entry.token_ids] == logits_of[wanted[row].token_ids]).all()


@pytest.mark.parametrize("is_lazy", [True, False], ids=["lazy", "eager"])
@pytest.mark.parametrize("padded_size", [1, 4])
@torch.inference_mode()
def test_after_the_warm_up_nothing_compiles_or_waits_and_tokens_are_those_of_a_cpu(
    padded_size, is_lazy
):
    bridge = SimBridge("gaudi2", is_lazy=is_lazy, is_strict=True)
    state = static_state(bridge.device, to_device=HostBuffers(bridge).to_device)
    sampler = warm_up(bridge, state, padded_size)
    rng = np.random.default_rng(padded_size)
    for _ in range(60):
        mixture = Mixture(rng, padded_size, state.padding_row)
        before = replace(bridge.counters(), h2d_bytes=0, launches=None)
        with bridge.warmed_section():
            for row, request in enumerate(mixture.requests):
                state.add(row, request, mixture.outputs[row])
            metadata = state.metadata(mixture.launch, mixture.launch_done)
            logits = mixture.logits.to(bridge.device, non_blocking=True)
            got = sampler(logits, metadata)
        assert replace(bridge.counters(), h2d_bytes=0, launches=None) == before
        mixture.check(state, got)
        for row in range(len(mixture.requests)):
            state.remove(row)


@pytest.mark.parametrize("padded_size", [1, 9])
@pytest.mark.parametrize("vocab_size", [5, 128, 130, 1000])
def test_the_number_of_recipes_is_known_beforehand(lazy, vocab_size, padded_size):
    state = static_state(lazy.device, vocab_size=vocab_size)
    for _ in range(2):
        warm_up(lazy, state, padded_size)
        assert lazy.counters().compilations == num_recipes(state.shapes, padded_size)
    assert not lazy.counters().cpu_fallbacks and not lazy.counters().host_syncs


def test_a_real_vocabulary_has_few_recipes():
    assert [num_recipes(TYPICAL, n) for n in (1, 4, 64, 256)] == [23, 23, 24, 25]
    state = static_state(torch.device("meta"), **asdict(TYPICAL))
    assert sum(1 for _ in warmup_launches(state, 4)) == 10


def test_a_start_needs_a_greedy_and_a_random_recipe(lazy):
    state = static_state(lazy.device)
    sampler = Sampler(pass_elements=None, end_stage=lazy.mark_step)
    logits = lazy.zeros((NUM_ROWS, VOCAB_SIZE), torch.bfloat16)
    stages = set()
    for launch in basic_launches(state, NUM_ROWS):
        stages |= stages_of(launch)
        sampler(logits, launch)
    assert lazy.counters().compilations == len(stages) == 2


def test_a_start_with_rules_of_outputs_also_has_the_log_probabilities_of_time_stamps(lazy):
    state = static_state(lazy.device, has_rules=True)
    sampler = Sampler(pass_elements=None, end_stage=lazy.mark_step)
    logits = lazy.zeros((NUM_ROWS, VOCAB_SIZE), torch.bfloat16)
    stages = set()
    for launch in basic_launches(state, NUM_ROWS):
        stages |= stages_of(launch)
        sampler(logits, launch)
    found = {(name, size) for name, size, _ in stages if name in ("rules", "logprobs")}
    sizes = {("rules", size) for size in size_classes(NUM_ROWS)}
    assert found == {*sizes, ("logprobs", size_classes(MAX_LOGPROBS)[0])}


def test_a_stage_is_named_for_each_recipe_and_the_heaviest_launch_needs_the_most(lazy):
    state, stages, peaks = static_state(lazy.device), set(), []
    sampler = Sampler(pass_elements=None, end_stage=lazy.mark_step)
    logits = lazy.zeros((NUM_ROWS, VOCAB_SIZE), torch.bfloat16)
    for launch in (*warmup_launches(state, NUM_ROWS), heaviest_launch(state, NUM_ROWS)):
        stages |= stages_of(launch)
        lazy.reset_peak()
        sampler(logits, launch)
        peaks.append(lazy.peak_bytes())
    assert len(stages) == num_recipes(state.shapes, NUM_ROWS) == lazy.counters().compilations
    assert peaks[-1] == max(peaks)


def test_logits_processors_wait_but_compile_nothing(lazy):
    state = static_state(lazy.device)
    sampler = warm_up(lazy, state, NUM_ROWS)
    processors = [lambda output, logits: logits.index_fill(0, torch.tensor([output[0]]), 50.0)]
    compiled = lazy.counters().compilations
    for row in range(NUM_ROWS):
        state.add(row, make_request(temperature=0.0, logits_processors=processors), [30 + row])
        order = rows(*range(row + 1))
        metadata = state.metadata(order, np.ones_like(order), NUM_ROWS)
        logits = torch.zeros(NUM_ROWS, VOCAB_SIZE, dtype=torch.bfloat16).to(lazy.device)
        tokens = sampler(logits, metadata).token_ids.tolist()
        assert tokens == [30, 31, 32, 33][: row + 1] + [0] * (NUM_ROWS - row - 1)
    assert lazy.counters().compilations == compiled


@pytest.mark.parametrize(
    ("params", "copies"),
    [
        ({"temperature": 0.0}, 0),
        ({"temperature": 0.0, "logprobs": 3}, 0),
        ({}, 2),
        ({"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1}, 2),
        ({"temperature": 0.0, "repetition_penalty": 1.5}, 3),
    ],
    ids=str,
)
def test_a_launch_takes_few_copies_to_the_device(lazy, monkeypatch, params, copies):
    state = static_state(lazy.device)
    state.add(0, make_request(**params), [])
    sizes: list[int] = []
    monkeypatch.setattr(lazy.card, "copy_to_device", lambda size, waits: sizes.append(size))
    state.metadata(rows(0), rows(0), NUM_ROWS)
    assert len(sizes) == copies


def test_padding_rows_are_greedy_wherever_they_are_and_report_nothing():
    state = static_state(CPU)
    state.add(2, make_request(logprobs=1, top_p=0.5), [])
    pad = state.padding_row
    logits = torch.zeros(4, VOCAB_SIZE)
    logits[:3, [4, 5, 6]] = torch.eye(3) * 50
    logits[3] = torch.nan
    order = rows(pad, 2, pad, pad)
    output = Sampler(pass_elements=None)(logits, state.metadata(order, rows(7, 0, 0, 9)))
    assert output.host_ids.tolist() == [4, 5, 6, -1]
    assert output.invalid.tolist() == [False, False, False, True]
    assert state.errors_of(order, output) == {}
    assert list(state.logprob_rows(order, output)) == [2]
    state.record(order, output.token_ids.numpy())
    logits[1] = torch.nan
    output = Sampler(pass_elements=None)(logits, state.metadata(order, rows(7, 0, 0, 9)))
    host_ids = output.host_ids.numpy()
    assert host_ids.tolist() == [4, -1, 6, -1]
    assert state.errors_of(order, output, host_ids).keys() == {2}


def distributions():
    """Return the parameters of one request that determine its distribution."""
    return st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from([0.0, 0.01, 0.9, 30.0]),
            "top_k": st.sampled_from([1, 2, 100, 128, 129, 599, 600]),
            "top_p": st.sampled_from([1e-6, 0.5, 0.999]),
            "min_p": st.sampled_from([1e-9, 0.1, 1.0]),
        },
    )


@repeatable
@given(st.lists(distributions(), min_size=1, max_size=6), st.integers(0, 2**32))
def test_a_kind_of_distribution_gives_the_tokens_of_the_parameters(params, seed):
    requests = [make_request(seed=seed + i, **p) for i, p in enumerate(params)]
    logits = random_logits(np.random.default_rng(seed), len(params))
    order = np.arange(len(params), dtype=np.int32)
    static = make_state(requests, VOCAB_SIZE, static_shapes=True).metadata(order, order)
    assert static.active in (GREEDY, RANDOM, FILTERED, FILTERED_LARGE)
    got = Sampler(pass_elements=None)(logits, static).token_ids
    for i, request in enumerate(requests):
        alone = make_state([request], VOCAB_SIZE).metadata(rows(0), rows(i))
        assert Sampler()(logits[i : i + 1], alone).token_ids[0] == got[i]


@pytest.mark.parametrize(
    ("active", "kind"),
    [
        (Feature.EDITS, GREEDY | Feature.EDITS),
        (Feature.RANDOM, RANDOM),
        (Feature.RANDOM | Feature.MASK, RANDOM | Feature.MASK),
        (Feature.RANDOM | Feature.MIN_P, FILTERED),
        (Feature.RANDOM | Feature.TOP_K | Feature.LARGE_TOP_K, FILTERED_LARGE),
    ],
)
def test_a_launch_is_of_the_least_kind_that_has_all_it_needs(active, kind):
    assert canonical(active) == kind


def test_sizes_are_powers_of_eight_up_to_their_limit():
    assert size_classes(8192) == (8, 64, 512, 4096, 8192)
    assert [size_classes(limit) for limit in (1, 8, 9)] == [(1,), (8,), (8, 9)]
    assert [class_of(size, 100) for size in (0, 1, 8, 9, 64, 65, 100)] == [
        8,
        8,
        8,
        64,
        64,
        100,
        100,
    ]
    with pytest.raises(AssertionError, match="101 is above the limit of 100"):
        class_of(101, 100)


def test_every_token_may_be_edited_and_no_more():
    request = make_request(
        temperature=0.0,
        logit_bias=dict.fromkeys(range(VOCAB_SIZE), 1.0),
        bad_words=[[t] for t in range(0, VOCAB_SIZE, 2)] + [[1, t] for t in range(1, 9)],
    )
    state = make_state([request], VOCAB_SIZE, [[1]], static_shapes=True)
    metadata = state.metadata(rows(0), rows(1))
    assert metadata.edits.token_ids.shape == (1, VOCAB_SIZE)
    assert len(set(metadata.edits.token_ids[0].tolist())) == VOCAB_SIZE
    output = Sampler(pass_elements=None)(torch.zeros(1, VOCAB_SIZE), metadata)
    assert output.token_ids.tolist() == [9]
