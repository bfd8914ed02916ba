"""Test that drafts change no output, whether they are right, partly right, wrong, empty, or longer
than the output.

`Loop` and `FakeRunner` check each step.
"""

import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.core.helpers import Loop, make_request, make_scheduler, num_scheduled
from tests.core.reference import GuessSource, expected_result, next_tokens
from tests.core.test_any_load import (
    MAX_MODEL_LEN,
    WINDOWS,
    programs,
    random_event,
    random_setup,
    run_program,
    setups,
)
from tests.exhaustive import seeds
from tests.reach import scheduled_steps_of
from vllm.core.draft_sources import ModelDrafts
from vllm.core.drafting.draft_control import DraftControl
from vllm.messages import Finished, FinishReason
from vllm.request import Request


@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    setups(), programs(), st.integers(1, 9), st.integers(0, 5), st.randoms(use_true_random=False)
)
def test_drafts_change_no_output_of_any_load(setup, program, max_drafts, stalls_every, rng):
    setup.draft_source = GuessSource(rng, max_drafts)
    setup.stalls_every = stalls_every if stalls_every > 1 else 0
    run_program(setup, program)


@pytest.mark.parametrize("seed", seeds(3, 18))
def test_drafts_change_no_output_of_a_long_crowded_load(seed):
    rng = random.Random(seed)
    setup = random_setup(rng)
    setup.draft_source = GuessSource(rng, rng.choice([1, 3, 5, 20]))
    setup.stalls_every = rng.choice([0, 0, 7])
    loop = run_program(setup, [random_event(rng) for _ in range(150)])
    assert loop.runner.num_verified


@pytest.mark.parametrize("seed", seeds(2, 8))
def test_drafts_of_the_worker_change_no_output(seed):
    rng = random.Random(seed)
    setup = random_setup(rng)
    setup.guesses = rng
    setup.draft_source = ModelDrafts(rng.choice([1, 3, 5]), MAX_MODEL_LEN)
    loop = run_program(setup, [random_event(rng) for _ in range(150)])
    assert loop.runner.num_verified


class MoodyControl(DraftControl):
    """Pauses drafts for some random steps, even while steps are in flight."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(9, adaptive=False)
        self._rng, self.num_left, self.is_paused = rng, 0, False

    def pauses(self, num_running: int) -> bool:
        if not self.num_left:
            self.num_left, self.is_paused = self._rng.randint(1, 12), not self.is_paused
        self.num_left -= 1
        return self.is_paused


@pytest.mark.parametrize("seed", seeds(2, 6))
def test_drafts_that_pause_and_come_back_change_no_output(seed):
    rng = random.Random(seed)
    setup = random_setup(rng)
    setup.draft_source, setup.draft_control = GuessSource(rng, 9), MoodyControl(rng)
    loop = run_program(setup, [random_event(rng) for _ in range(150)])
    assert loop.runner.num_verified


def test_steps_run_ahead_while_drafts_pause():
    control = MoodyControl(random.Random(0))
    scheduler = make_scheduler(draft_source=RightSource(3), draft_control=control)
    scheduler.add_request(make_request("a", [1, 2, 3], max_tokens=20))
    control.num_left, control.is_paused = 100, True
    assert len(scheduler.schedule().rows) == len(scheduler.schedule().rows) == 1
    control.is_paused = False
    assert len(scheduler.schedule().rows) == 1, "drafts may follow from here on"
    assert not len(scheduler.schedule().rows), "a token is in flight"


@pytest.mark.parametrize("windows", sorted(set(WINDOWS) - {(None,)}, key=str))
def test_drafts_change_no_output_where_windows_give_blocks_back(windows):
    rng = random.Random(str(windows))
    setup = random_setup(rng)
    setup.windows, setup.block_size, setup.num_blocks = windows, 4, 12
    setup.draft_source = GuessSource(rng, 9)
    loop = run_program(setup, [random_event(rng) for _ in range(150)])
    num_shortened = loop.runner.num_shortened_behind_windows
    assert num_shortened > 10, "blocks of wrong drafts, in tables whose beginning was given back"


class RightSource:
    """Makes guesses that are always right, even beyond the end of the output."""

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self.asked: list[str] = []

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        self.asked += [request.request_id for request in requests]
        return [next_tokens(r.spec, r.token_ids, self.max_drafts + 5) for r in requests]

    def leave(self, request: Request) -> None:
        pass


class WrongSource(RightSource):
    """Makes guesses that are never right."""

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        return [[token + 1 for token in guess] for guess in super().propose(requests)]


class NoSource(RightSource):
    """A source that never guesses."""

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        super().propose(requests)
        return [[] for _ in requests]


def test_steps_run_ahead_where_no_drafts_are_looked_for():
    source = NoSource(3)
    scheduler = make_scheduler(draft_source=source)
    schedule, ahead = scheduler.schedule, []

    def scheduled():
        is_ahead = bool(scheduled_steps_of(scheduler))
        step = schedule()
        if len(step.rows):
            ahead.append(is_ahead)
        return step

    scheduler.schedule = scheduled
    loop = Loop(scheduler, depth=1)
    loop.add(make_request("a", 4, max_tokens=60))
    loop.run()
    assert len(ahead) == 60 and not any(ahead[1:8]), "drafts may follow each of the first steps"
    assert len(source.asked) < 16 and sum(ahead[9:]) > 40, "one of 8 steps asks, and waits"


def test_right_drafts_save_steps_and_the_last_token_is_no_draft():
    loop = Loop(make_scheduler(draft_source=RightSource(3)))
    loop.add(make_request("a", 8, max_tokens=10))
    scheduled = []
    while loop.scheduler.num_unfinished_requests:
        scheduled.append(loop.step()["a"])
    # The prefill step samples token 1. Later steps give 4 tokens, 4 tokens, and the tenth token.
    assert scheduled == [8, 4, 4, 1]
    assert loop.results["a"].token_ids == expected_result(make_request("a", 8, max_tokens=10))[0]


def test_tokens_behind_the_first_that_ends_a_request_are_dropped():
    spec = make_request("a", 8, max_tokens=30)
    first = next_tokens(spec, spec.prompt_token_ids, 8)
    end = next(i for i in range(1, 7) if first[i] not in first[:i])
    for ending, reason in (("eos", None), ("stop", first[end])):
        value = first[end] if ending == "eos" else (first[end],)
        spec = make_request("a", 8, max_tokens=30, logprobs=0, **{ending: value})
        loop = Loop(make_scheduler(draft_source=RightSource(12)))
        loop.add(spec)
        result = loop.run()["a"]
        assert result.token_ids == first[: end + 1]
        assert result.finished == Finished(FinishReason.STOP, reason)
        assert len(result.logprobs) == end + 1
        assert loop.num_steps == 2


def test_wrong_drafts_give_back_their_blocks():
    loop = Loop(make_scheduler(block_size=4, draft_source=WrongSource(9)))
    loop.add(make_request("a", 6, max_tokens=20))
    loop.step()
    loop.step()
    (request,) = loop.scheduler.running.requests
    assert len(request.token_ids) == 8 and len(request.block_ids) == 2
    used = loop.scheduler.cache.pool
    assert used.num_usable_blocks - used.num_free == 2


def test_drafts_take_only_the_budget_and_the_blocks_that_are_left():
    scheduler = make_scheduler(
        num_blocks=5, max_num_seqs=2, max_num_batched_tokens=8, draft_source=RightSource(20)
    )
    loop = Loop(scheduler)
    loop.add(make_request("a", 7, max_tokens=9))
    loop.step()
    assert loop.step() == {"a": 8}, "the budget"
    scheduler = make_scheduler(
        num_blocks=4, max_num_batched_tokens=64, draft_source=RightSource(20)
    )
    loop = Loop(scheduler)
    loop.add(make_request("a", 5, max_tokens=11))
    loop.step()
    # The step leaves one block free: the other 3 of 4 blocks hold 12 tokens, 5 of which are
    # computed.
    assert loop.step() == {"a": 7}, "the blocks"
    assert scheduler.num_preemptions == 0


def test_a_request_waits_while_its_drafts_are_in_flight_and_others_run():
    scheduler = make_scheduler(draft_source=RightSource(3))
    loop = Loop(scheduler, depth=1)
    loop.add(make_request("a", 8, max_tokens=12))
    assert loop.step() == {"a": 8}
    loop.add(make_request("b", 6, max_tokens=12))
    assert loop.step() == {"b": 6}
    assert loop.step() == {"a": 4}
    assert loop.step() == {"b": 4}
    loop.run()


def test_no_step_begins_that_would_split_the_batch_while_drafts_are_in_flight():
    """Otherwise the two parts of the batch would run alternately from then on, and each step runs
    the whole model.
    """
    source = RightSource(3)
    scheduler = make_scheduler(draft_source=source)
    loop = Loop(scheduler)
    loop.add(make_request("a", 4, 30))
    loop.step()
    assert scheduler.may_schedule
    first = scheduler.schedule()
    assert first.draft_token_ids is not None
    loop.add(make_request("b", 40, 30))
    assert not scheduler.may_schedule
    scheduler.update(loop.runner.execute(first))
    assert scheduler.may_schedule
    assert len(scheduler.schedule().rows) == 2


def test_a_request_with_logits_processors_is_never_given_drafts():
    source = RightSource(3)
    scheduler = make_scheduler(draft_source=source)
    loop = Loop(scheduler, depth=1)
    processors = [lambda output, logits: logits]
    loop.add(make_request("a", 8, max_tokens=6, logits_processors=processors))
    loop.add(make_request("b", 8, max_tokens=6))
    loop.step()
    step = scheduler.schedule()
    assert num_scheduled(scheduler, step) == {"a": 1}, "and does not wait for its result"
    assert set(source.asked) <= {"b"}


def test_prefix_cache_keys_cover_accepted_drafts_only():
    loop = Loop(make_scheduler(block_size=4, draft_source=WrongSource(9)))
    loop.add(make_request("a", 6, max_tokens=8))
    output = loop.run()["a"].token_ids
    follower = make_request("b", [*make_request("a", 6).prompt_token_ids, *output], max_tokens=4)
    loop.add(follower)
    assert loop.run()["b"].token_ids == expected_result(follower)[0]
    assert loop.results["b"].num_cached_tokens == [12]
