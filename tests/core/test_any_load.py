"""Test random loads: every request gets exactly the tokens that it gets without other requests, and
no block leaks.

Requests arrive, finish, share prefixes, run out of blocks and are cancelled. `Loop` and
`FakeRunner` check each step.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, cycle
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.core.helpers import Loop, make_request, make_scheduler
from tests.core.reference import FAILED_IMAGE, VOCAB_SIZE, expected_result
from tests.exhaustive import seeds
from vllm.core.drafting.draft_control import DraftControl
from vllm.core.drafts import DraftSource
from vllm.core.media import EncoderCache
from vllm.core.pacing.step_bound import StepBound
from vllm.errors import CapacityError
from vllm.messages import END_OF_REQUEST, EngineRequest, Finished, FinishReason

# A small vocabulary and a few fixed beginnings make equal prefixes, equal prompts and equal outputs
# common.
STEMS = ([1, 2, 1, 1, 2, 2, 1, 2] * 4, [1, 2, 1, 1, 2, 2, 2, 1] * 4, [3] * 32)
MAX_MODEL_LEN = 48
WINDOWS = [*[(None,)] * 4, (5,), (None, 5), (None, None, 16), (None, 9, 9), (7, 12), (1,)]
"""Windows of the groups of layers; None: full attention."""


@dataclass
class Setup:
    """The settings of an engine: limits of the scheduler, size of the cache, steps in flight."""

    limits: dict[str, Any]
    num_blocks: int
    block_size: int
    enable_caching: bool
    depth: int
    is_split: bool
    fails_at: dict[str, int] = field(default_factory=dict)
    windows: tuple[int | None, ...] = (None,)
    """Windows of the groups of layers; `num_blocks` counts the blocks of all groups together."""
    draft_source: DraftSource | None = None
    draft_control: DraftControl | None = None
    stalls_every: int = 0
    num_stages: int = 1
    """Number of stages of the pipeline."""
    num_pipelined_steps: int = 1
    is_dense: bool = False
    num_kept_states: int | None = None
    """Number of recurrent states that the cache keeps; None: the model has no states."""
    reads_tokens: bool = True
    guesses: random.Random | None = None
    """Random generator for random guesses, as FakeRunner makes them."""
    media: tuple[int, int, bool] | None = None
    """Arguments of EncoderCache; None: requests have no images."""
    max_step_s: float | None = None
    """Bound for the time of a step, by a clock that stands still or jumps at each reading."""
    fails_to_encode: Callable[[str], bool] | None = None
    """Tells whether an image with this key fails now; None: none does."""

    def loop(self) -> Loop:
        scheduler = make_scheduler(
            draft_source=self.draft_source,
            draft_control=self.draft_control,
            num_blocks=self.num_blocks * len(self.windows),
            windows=self.windows,
            block_size=self.block_size,
            enable_caching=self.enable_caching,
            max_model_len=MAX_MODEL_LEN,
            num_stages=self.num_stages,
            num_pipelined_steps=self.num_pipelined_steps,
            is_dense=self.is_dense,
            num_kept_states=self.num_kept_states,
            media=None if self.media is None else make_media(*self.media),
            step_bound=None if self.max_step_s is None else StepBound(self.max_step_s, 1, 1),
            clock=accumulate(cycle((0.0, 1.0, 1.0, 1e-6, 1.0, 60.0, 1.0))).__next__,
            **self.limits,
        )
        return Loop(
            scheduler,
            self.depth,
            self.is_split,
            self.fails_at,
            self.stalls_every,
            self.reads_tokens,
            self.guesses,
            self.fails_to_encode,
        )


def make_media(capacity: int, budget: int, is_whole: bool) -> EncoderCache:
    return EncoderCache(capacity, budget, most_whole=MAX_IMAGE if is_whole else None)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    block_size = draw(st.sampled_from([1, 4, 4, 16]))
    max_num_seqs = draw(st.integers(1, 6))
    is_chunked = draw(st.booleans())
    least = max_num_seqs if is_chunked else MAX_MODEL_LEN
    max_partial = draw(st.integers(1, 3))
    limits = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": least + draw(st.integers(0, 24)),
        "enable_chunked_prefill": is_chunked,
        "max_num_partial_prefills": max_partial,
        "max_long_partial_prefills": draw(st.integers(1, max_partial)),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 3, 8])),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "num_scheduler_steps": draw(st.sampled_from([1, 1, 2, 5])),
    }
    min_blocks = -(-MAX_MODEL_LEN // block_size)
    num_stages = draw(st.sampled_from([1, 1, 2, 3]))
    num_steps = draw(st.integers(1, num_stages))
    return Setup(
        limits=limits,
        num_blocks=draw(st.integers(max(2, min_blocks // 2), min_blocks * 3)),
        block_size=block_size,
        enable_caching=draw(st.sampled_from([True, True, False])),
        depth=draw(st.integers(0, num_steps - 1)) if num_stages > 1 else draw(st.integers(0, 1)),
        is_split=draw(st.booleans()),
        num_stages=num_stages,
        num_pipelined_steps=num_steps,
        fails_at={
            str(i): draw(st.integers(0, 3)) for i in draw(st.sets(st.integers(0, 20), max_size=2))
        },
        windows=draw(st.sampled_from(WINDOWS)),
        is_dense=draw(st.booleans()),
        num_kept_states=draw(st.sampled_from([None, None, 0, 1, 2, 3, 8])),
        reads_tokens=draw(st.booleans()),
        max_step_s=draw(st.sampled_from([None, 0.5, 3.0])) if is_chunked else None,
    )


@st.composite
def arrivals(draw: st.DrawFn) -> dict[str, Any]:
    """Return arguments of `make_request`, without the id."""
    stem = draw(st.sampled_from(STEMS))[: draw(st.integers(0, 32))]
    tail = draw(st.lists(st.integers(0, 2), min_size=0 if stem else 1, max_size=6))
    max_tokens = draw(st.integers(1, MAX_MODEL_LEN - len(stem) - len(tail)))
    return {
        "prompt": [*stem, *tail],
        "max_tokens": draw(st.sampled_from([max_tokens, min(max_tokens, 3)])),
        "eos": draw(st.sampled_from([None, None, 5])),
        "stop": draw(st.sampled_from([(), (), (4,), (3, 5)])),
        "min_tokens": draw(st.integers(0, min(3, max_tokens, 3))) if max_tokens > 3 else 0,
        "priority": draw(st.integers(-1, 1)),
        "arrival_time": float(draw(st.integers(0, 3))),
        "salt": draw(st.sampled_from([None, None, None, "salt"])),
        "extra_keys": draw(st.sampled_from([(), (), (), ((0, "lora"),), ((5, "image"),)])),
        "prompt_logprobs": draw(st.sampled_from([None, None, None, 0])),
        "logprobs": draw(st.sampled_from([None, 0])),
    }


def programs() -> st.SearchStrategy[list[Any]]:
    """Draw events in order: requests arrive or are cancelled, steps run, results come in."""
    event = st.one_of(
        st.tuples(st.just("add"), arrivals()),
        st.tuples(st.just("add"), arrivals()),
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.just("take in"), st.none()),
        st.tuples(st.just("abort"), st.integers(0, 20)),
    )
    return st.lists(event, min_size=1, max_size=40)


def run_program(setup: Setup, program: Sequence[tuple[str, Any]]) -> Loop:
    """Run a load to its end, and check that each request got the tokens that it gets without other
    requests.
    """
    loop = setup.loop()
    specs: dict[str, EngineRequest] = {}
    for number, (event, value) in enumerate(program):
        if event == "step":
            for _ in range(value):
                loop.step()
        elif event == "take in":
            loop.take_in()
        elif event == "abort":
            loop.abort(str(value), f"unknown {number}")
        else:
            spec = make_request(str(len(specs)), **value)
            try:
                loop.add(spec)
            except CapacityError:
                continue
            specs[spec.request_id] = spec
    loop.run()
    for name, spec in specs.items():
        check_result(loop, setup, spec, name)
    return loop


def check_result(loop: Loop, setup: Setup, spec: EngineRequest, name: str) -> None:
    """Check that a request got the tokens, finish reason and log-probabilities that it gets without
    other requests.
    """
    result = loop.results[name]
    token_ids, finished = expected_result(spec, setup.fails_at.get(name))
    has_failed = result.finished == Finished(FinishReason.ERROR, error=FAILED_IMAGE)
    if has_failed:
        assert setup.fails_to_encode is not None and spec.media
    is_aborted = has_failed or result.finished == Finished(FinishReason.ABORT)
    if is_aborted:
        token_ids = token_ids[: len(result.token_ids)]
    else:
        assert result.finished == finished
    assert result.token_ids == token_ids
    if spec.sampling_params.logprobs is not None:
        assert result.logprobs == list(enumerate(token_ids))
    if spec.sampling_params.prompt_logprobs is not None:
        everything = list(enumerate(spec.prompt_token_ids[1:]))
        if is_aborted and not token_ids:
            everything = everything[: len(result.prompt_logprobs)]
        assert result.prompt_logprobs == everything
        assert result.num_cached_tokens in ([0], [])
    assert len(result.num_cached_tokens) == 1 or (is_aborted and not token_ids)
    assert all(count < len(spec.prompt_token_ids) for count in result.num_cached_tokens)
    if not setup.enable_caching:
        assert not any(result.num_cached_tokens)


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(setups(), programs())
def test_any_load_gives_everybody_what_they_get_alone(setup, program):
    run_program(setup, program)


@pytest.mark.parametrize("seed", seeds(4, 120))
def test_a_long_crowded_load_gives_everybody_what_they_get_alone(seed):
    rng = random.Random(seed)
    setup = random_setup(rng)
    program = [random_event(rng) for _ in range(150)]
    run_program(setup, program)


def random_setup(rng: random.Random) -> Setup:
    """Return a setup like `setups`, with more requests at a time and a smaller cache for each."""
    block_size = rng.choice([1, 4, 4, 16])
    max_num_seqs = rng.randint(2, 12)
    is_chunked = rng.random() < 0.7
    max_partial = rng.randint(1, 3)
    min_blocks = -(-MAX_MODEL_LEN // block_size)
    return Setup(
        limits={
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_seqs + rng.randint(0, 20) if is_chunked else 64,
            "enable_chunked_prefill": is_chunked,
            "max_num_partial_prefills": max_partial,
            "max_long_partial_prefills": rng.randint(1, max_partial),
            "long_prefill_token_threshold": rng.choice([0, 3, 5, 8]),
            "scheduling_policy": rng.choice(["fcfs", "priority"]),
        },
        num_blocks=rng.randint(min_blocks, min_blocks * 4),
        block_size=block_size,
        enable_caching=rng.random() < 0.7,
        depth=rng.choice([0, 1, 1, 2]),
        is_split=rng.random() < 0.5,
        fails_at={str(rng.randrange(40)): rng.randrange(4) for _ in range(3)},
        windows=rng.choice(WINDOWS),
        is_dense=rng.random() < 0.5,
        num_kept_states=rng.choice([None, None, 0, 1, 2, 3, 8, 30]),
        max_step_s=rng.choice([None, 0.5, 3.0]) if is_chunked else None,
    )


def random_event(rng: random.Random) -> tuple[str, Any]:
    draw = rng.random()
    if draw < 0.45:
        return "step", rng.choice([1, 1, 1, 4])
    if draw < 0.55:
        return "abort", rng.randrange(60)
    if draw < 0.6:
        return "take in", None
    stem = rng.choice(STEMS)[: rng.choice([0, 4, 7, 8, 9, 16, 17, rng.randint(0, 32)])]
    prompt = [*stem, *(rng.randrange(3) for _ in range(rng.randint(0 if stem else 1, 6)))]
    room = MAX_MODEL_LEN - len(prompt)
    max_tokens = rng.choice([1, 2, room, rng.randint(1, room)])
    return "add", {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "eos": rng.choice([None, None, rng.randrange(VOCAB_SIZE)]),
        "stop": rng.choice([(), (), (4,), (3, 5)]),
        "min_tokens": rng.randint(0, min(3, max_tokens)),
        "priority": rng.choice([-1, 0, 0, 0, 1]),
        "arrival_time": float(rng.randrange(4)),
        "salt": rng.choice([None, None, None, "salt"]),
        "extra_keys": rng.choice([(), (), (), ((0, "lora"),), ((5, "image"),)]),
        "prompt_logprobs": rng.choice([None, None, None, 0]),
        "logprobs": rng.choice([None, 0]),
    }


@pytest.mark.parametrize("seed", seeds(3, 40))
def test_a_crowded_load_with_images_gives_everybody_what_they_get_alone(seed):
    rng = random.Random(seed)
    setup = random_setup(rng)
    if setup.limits["enable_chunked_prefill"]:
        setup.media = (rng.randint(MAX_IMAGE, 24), rng.choice([1, 4, 12]), rng.random() < 0.3)
        least = setup.limits["max_num_seqs"] + MAX_IMAGE
        if setup.media[2]:
            setup.limits["long_prefill_token_threshold"] = 8
            setup.limits["max_num_batched_tokens"] = least + rng.randint(0, 8)
    else:
        setup.media = (MAX_MODEL_LEN * 4, 10**9, False)
    program = [with_images(rng, random_event(rng)) for _ in range(120)]
    loop = run_program(setup, program)
    assert loop.runner.num_encoded
    assert len(loop.runner.parts) > loop.runner.num_encoded or setup.media[1] >= MAX_IMAGE
    assert loop.scheduler.media is not None
    assert loop.scheduler.media.num_queries >= loop.runner.num_encoded


@pytest.mark.parametrize("seed", seeds(3, 30))
def test_a_crowded_load_with_cross_attention_gives_everybody_what_they_get_alone(seed):
    rng = random.Random(seed)
    setup = random_setup(rng)
    setup.media = (rng.randint(2 * MAX_IMAGE, 30), rng.choice([1, 4, 12]), False)
    program = [with_seen_items(rng, random_event(rng)) for _ in range(120)]
    loop = run_program(setup, program)
    assert loop.runner.num_encoded


@pytest.mark.parametrize("add_items", ["images", "cross-attention"])
@pytest.mark.parametrize("seed", seeds(3, 60))
def test_requests_whose_images_fail_end_and_leave_nothing_to_others(seed, add_items):
    rng = random.Random(seed)
    setup = random_setup(rng)
    setup.media = (MAX_MODEL_LEN * 4, 10**9, False)
    if setup.limits["enable_chunked_prefill"]:
        setup.media = (rng.randint(2 * MAX_IMAGE, 30), rng.choice([1, 4, 12]), False)
    setup.num_stages = rng.choice([1, 2, 3])
    setup.num_pipelined_steps = rng.randint(1, setup.num_stages)
    if setup.num_stages > 1:
        setup.depth = setup.num_pipelined_steps - 1
    fails = random.Random(seed)
    share = rng.choice([0.2, 1.0])
    broken = {"image 0", "image 1", "item 0", "item 1"}

    def fails_to_encode(key: str) -> bool:
        return key[: key.index(" of")] in broken and fails.random() < share

    setup.fails_to_encode = fails_to_encode
    add = with_images if add_items == "images" else with_seen_items
    program: list[tuple[str, Any]] = []
    for _ in range(120):
        program.append(add(rng, random_event(rng)))
        if program[-1][0] == "add" and rng.random() < 0.5:
            # Add the same request again: it shares blocks and images with the first one.
            program += [("step", 1)] * rng.randrange(2) + [program[-1]]
    loop = run_program(setup, program)
    ends = [result.finished.error for result in loop.results.values() if result.finished]
    assert 0 < ends.count(FAILED_IMAGE) < len(ends)


MAX_IMAGE = 7
"""Embeddings of an image."""
PARTS = (1, 2, 3, 5)
"""Parts of each image, if it has as many embeddings."""


def with_seen_items(rng: random.Random, event: tuple[str, Any]) -> tuple[str, Any]:
    """Let tokens of an arriving prompt see items; all later tokens see the last item."""
    if event[0] != "add" or rng.random() < 0.3:
        return event
    starts = sorted(rng.sample(range(len(event[1]["prompt"])), min(2, len(event[1]["prompt"]))))
    starts = starts[: rng.randint(1, 2)]
    ends = [rng.choice([end, END_OF_REQUEST]) for end in starts[1:]]
    seen = []
    for start, end in zip(starts, [*ends, END_OF_REQUEST], strict=True):
        count = rng.randint(1, MAX_IMAGE)
        number = rng.randrange(4)
        seen.append((start, end, count, f"item {number} of {count}", min(count, PARTS[number])))
    return "add", {**event[1], "seen": seen}


def with_images(rng: random.Random, event: tuple[str, Any]) -> tuple[str, Any]:
    """Let images provide the embeddings of some tokens of an arriving prompt."""
    if event[0] != "add" or rng.random() < 0.3:
        return event
    media, index = [], 0
    while (index := index + rng.randrange(8)) < len(event[1]["prompt"]):
        count = min(rng.randint(1, MAX_IMAGE), len(event[1]["prompt"]) - index)
        number = rng.randrange(4)
        media.append((index, count, f"image {number} of {count}", min(count, PARTS[number])))
        index += count
    return "add", {**event[1], "media": media}
