"""Test steps with several decodes: the same outputs in fewer steps, and one decode if the host is
needed.
"""

import random

import pytest

from tests.core.helpers import Loop, make_request, make_scheduler
from tests.core.reference import GuessSource
from tests.core.test_any_load import random_event, random_setup, run_program
from tests.exhaustive import exhaustive


@pytest.mark.parametrize("num_loads", [12, exhaustive(100)])
def test_crowded_loads_give_everybody_what_they_get_alone(num_loads):
    num_further = 0
    for seed in range(num_loads):
        rng = random.Random(seed)
        setup = random_setup(rng)
        setup.limits["num_scheduler_steps"] = rng.choice([2, 3, 8])
        setup.reads_tokens = rng.random() < 0.5
        program = [random_event(rng) for _ in range(120)]
        for event, value in program:
            if event == "add" and rng.random() < 0.9:
                value["logprobs"] = None
        num_further += run_program(setup, program).runner.num_further_decodes
    assert num_further > 150


def steps_of(*specs, arriving=None, **settings) -> tuple[list[int], Loop]:
    """Return the number of decodes of each step until no request is left.

    Args:
        specs: requests that are there from the beginning.
        arriving: a request that arrives before the fourth step.
        settings: settings of the scheduler.
    """
    scheduler = make_scheduler(**{"num_scheduler_steps": 8, "block_size": 4} | settings)
    loop = Loop(scheduler)
    loop.add(*specs)
    found, schedule = [], scheduler.schedule

    def scheduled():
        step = schedule()
        if len(step.rows):
            found.append(step.num_decodes)
        if len(found) == 3 and arriving is not None:
            loop.add(arriving)
        return step

    scheduler.schedule = scheduled
    loop.run()
    return found, loop


def test_a_steady_batch_runs_so_many_decodes_and_no_more_than_a_row_may_have():
    assert steps_of(make_request("a", 8, 21))[0] == [1, 8, 8, 4]
    assert steps_of(make_request("a", 8, 21), make_request("b", 8, 6))[0] == [1, 5, 8, 7]


def test_prompts_and_requests_that_arrive_have_steps_of_one_decode():
    specs = make_request("a", 8, 40), make_request("b", 8, 40)
    assert steps_of(*specs, arriving=make_request("c", 8, 2))[0] == [1, 8, 8, 1, 1, 8, 8, 5]


def test_a_request_that_has_no_row_ends_no_group():
    found, _ = steps_of(make_request("a", 8, 9), make_request("b", 8, 9), max_num_seqs=1)
    assert found == [1, 8, 1, 8]


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 0},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5},
        {"stop": range(100, 109)},
    ],
    ids=str,
)
def test_where_the_host_is_needed_after_each_token_a_step_has_one_decode(options):
    other = make_request("a", 8, 4)
    assert steps_of(other, make_request("b", 8, 4, **options))[0] == [1] * 4


def test_drafts_take_the_place_of_several_decodes():
    source = GuessSource(random.Random(0), 2)
    assert set(steps_of(make_request("a", 8, 9), draft_source=source)[0]) == {1}


def test_nobody_is_preempted_for_further_decodes():
    """Of 7 blocks, both requests hold 3 each; one is free when both need a fourth."""
    specs = make_request("a", 8, 6), make_request("b", 8, 6)
    found, loop = steps_of(*specs, num_blocks=8, enable_caching=False)
    assert found[0] == 1 and loop.scheduler.num_preemptions == 0
