"""Test prefix caching of a model whose layers keep a recurrent state for each request."""

import random

import pytest

from tests.core.helpers import Loop, make_request, make_scheduler
from tests.core.reference import GuessSource
from tests.core.test_any_load import random_event, random_setup, run_program
from tests.exhaustive import seeds
from vllm.core.draft_sources import ModelDrafts

PROMPT = list(range(100, 121))


def run(loop: Loop, name: str, prompt: list[int], **more) -> int:
    """Run a request to its end. Return how many of its tokens were found in the cache."""
    loop.add(make_request(name, prompt=prompt, **more))
    loop.run()
    return loop.results[name].num_cached_tokens[0]


def states_loop(**settings) -> Loop:
    return Loop(make_scheduler(block_size=4, num_kept_states=8, **settings), depth=1)


def test_a_prompt_is_found_up_to_its_last_full_block():
    loop = states_loop(max_num_batched_tokens=9)
    assert run(loop, "first", PROMPT, max_tokens=1) == 0
    assert run(loop, "again", PROMPT, max_tokens=1) == 20
    assert run(loop, "a token more", [*PROMPT, 1], max_tokens=1) == 20
    assert run(loop, "another salt", PROMPT, max_tokens=1, salt="mine") == 0
    assert loop.runner.num_restored == 2


def test_the_next_turn_of_a_conversation_begins_behind_the_last_answer():
    loop = states_loop()
    run(loop, "first", PROMPT, max_tokens=14)
    spoken = [*PROMPT, *loop.results["first"].token_ids]
    assert len(spoken) == 35
    assert run(loop, "second", [*spoken, 1, 2, 3], max_tokens=1) == 32


def test_a_state_is_kept_where_prompts_part():
    loop = states_loop()
    common = PROMPT[:12]
    assert run(loop, "first", [*common, *[1] * 10], max_tokens=1) == 0
    assert run(loop, "second", [*common, *[2] * 10], max_tokens=1) == 0, "its blocks are known only"
    assert run(loop, "third", [*common, *[3] * 10], max_tokens=1) == 12


def test_without_room_nothing_is_found():
    loop = Loop(make_scheduler(block_size=4, num_kept_states=0))
    assert [run(loop, name, PROMPT, max_tokens=9) for name in "ab"] == [0, 0]


def test_the_oldest_states_make_room():
    loop = Loop(make_scheduler(block_size=4, num_kept_states=2))
    prompts = [[number, *PROMPT] for number in range(3)]
    for number, prompt in enumerate(prompts):
        run(loop, f"first {number}", prompt, max_tokens=1)
    assert [run(loop, f"again {n}", prompts[n], max_tokens=1) for n in (2, 1, 0)] == [20, 20, 0]


def test_an_empty_cache_has_no_states():
    loop = states_loop()
    run(loop, "first", PROMPT, max_tokens=1)
    assert loop.scheduler.cache.forget_all()
    assert run(loop, "again", PROMPT, max_tokens=1) == 0


def test_with_right_drafts_the_next_turn_begins_where_the_last_ones_began():
    loop = Loop(
        make_scheduler(block_size=4, num_kept_states=8, draft_source=ModelDrafts(3, 128)),
        guesses=AlwaysRight(),
    )
    assert run(loop, "first", PROMPT, max_tokens=14) == 0
    spoken = [*PROMPT, *loop.results["first"].token_ids]
    # Each step gives 4 tokens. The next step computes these 4 again, across the end of a block.
    assert run(loop, "second", [*spoken, 1, 2, 3], max_tokens=1) == 32
    assert loop.runner.num_kept_of_replays == 3


class AlwaysRight(random.Random):
    """Makes `FakeRunner` guess right."""

    def choice(self, seq):
        return seq[0]


@pytest.mark.parametrize("seed", seeds(4, 8))
def test_no_state_takes_in_a_wrong_draft_in_a_crowded_load(seed):
    """`FakeRunner` compares each recurrent state with the tokens of its request."""
    rng = random.Random(seed)
    setup = random_setup(rng)
    setup.draft_source = GuessSource(rng, rng.choice([1, 3, 5, 20]))
    setup.enable_caching, setup.num_kept_states = True, rng.choice([2, 8, 30])
    setup.block_size, setup.num_blocks = 4, rng.randint(12, 48)
    setup.stalls_every = rng.choice([0, 7])
    runner = run_program(setup, [random_event(rng) for _ in range(200)]).runner
    assert runner.num_replayed and runner.num_kept_of_replays and runner.num_restored
