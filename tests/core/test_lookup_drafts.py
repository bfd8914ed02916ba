"""Test drafts that are looked up in known text: their source, when they pause, and that they change
no output.
"""

import random

import numpy as np
import pytest

from tests.core.helpers import make_request
from tests.core.test_any_load import random_event, random_setup, run_program
from tests.reach import indexed_requests_of, num_remembered_tokens_of
from vllm.config.speculative import LOOKUP_DRAFTS, DraftOptions
from vllm.core.drafting.draft_control import DraftControl, StepCost
from vllm.core.drafting.lookup_drafts import NgramDrafts, SuffixDrafts
from vllm.core.drafting.token_index import TokenIndex
from vllm.request import Request


def request_of(tokens: list[int], name: str = "a", num_prompt: int = 1) -> Request:
    request = Request(make_request(name, tokens[:num_prompt], 1000), (0,))
    request.token_ids = list(tokens)
    return request


def best_place(text: list[int], n: int, most: int) -> tuple[int, int]:
    """Return the latest of the positions at which most tokens agree, by comparing all positions."""
    best = (0, 0)
    for end in range(n, len(text)):
        length = 0
        while length < min(most, end) and text[end - length - 1] == text[-length - 1]:
            length += 1
        if length >= n and length >= best[1]:
            best = (end, length)
    return best


def test_the_index_finds_the_latest_of_the_longest_matches():
    rng = random.Random(3)
    for _ in range(400):
        n = rng.randint(1, 3)
        text = [rng.randrange(4) for _ in range(rng.randint(n + 1, 14))]
        index = TokenIndex(n)
        cut = rng.randrange(len(text))
        index.append(text[:cut])
        index.append(text[cut:])
        most = rng.randint(n, 6)
        want = best_place(text, n, most)
        # The index compares only the latest positions; these short texts do not have more.
        assert index.find(text, most) == want, (text, n, most)
        if want[1]:
            found = index.continuation(want[0], 5)
            whole = text + found
            assert found == [whole[want[0] + i] for i in range(5)], "a period goes on"


def test_ngram_drafts_follow_the_last_occurrence_in_the_own_text():
    source = NgramDrafts(DraftOptions(method="ngram", num_speculative_tokens=3))
    assert source.propose([request_of([1, 2, 3, 4, 5, 9, 1, 2])]) == [[3, 4, 5]]
    other = request_of([1, 2], "b")
    assert source.propose([other]) == [[]], "too short, and not the text of the other request"
    other.token_ids += [1, 2]
    assert source.propose([other]) == [[1, 2, 1]]


def test_a_long_prompt_is_indexed_in_parts():
    text = [token % 50_000 for token in range(20_000)]
    request = request_of([*text, 7, 8, 9])
    source = NgramDrafts(DraftOptions(method="ngram"))
    found = [source.propose([request])[0] for _ in range(3)]
    assert found == [[], [], list(range(10, 10 + LOOKUP_DRAFTS))]


def test_suffix_drafts_also_follow_outputs_of_earlier_requests_in_bounded_memory():
    source = SuffixDrafts(DraftOptions(method="suffix", suffix_cache_tokens=64))
    assert source.propose([request_of([5, 6], "new")]) == [[]]
    earlier = request_of([0, 5, 6, 7, 8, 9], "earlier")
    source.leave(earlier)
    assert source.propose([request_of([5, 6], "new")]) == [[7, 8, 9]], "not beyond its end"
    assert source.propose([request_of([0, 5], "prompt")]) == [[]], "prompts are not remembered"
    for number in range(40):
        source.leave(request_of([0, *range(100 * number, 100 * number + 20)], str(number)))
    assert num_remembered_tokens_of(source) <= 64
    assert source.propose([request_of([5, 6], "late")]) == [[]], "the oldest were dropped"
    assert source.propose([request_of([3905, 3906], "later")]) == [[3907, 3908, 3909, 3910]]


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_they_change_no_output_of_a_crowded_load(method):
    for seed in range(4):
        rng = random.Random(seed)
        setup = random_setup(rng)
        options = DraftOptions(method=method, prompt_lookup_min=1, num_speculative_tokens=6)
        source = {"ngram": NgramDrafts, "suffix": SuffixDrafts}[method]
        setup.draft_source = source(options)
        loop = run_program(setup, [random_event(rng) for _ in range(150)])
        assert loop.runner.num_verified
        assert not indexed_requests_of(setup.draft_source), "every request has left"


def drafted(control: DraftControl, request: Request, num_drafts: int, right: int) -> None:
    control.record([request], np.array([num_drafts]), np.array([right + 1]))


def test_a_request_whose_drafts_are_wrong_gets_fewer_and_tries_again_later():
    control, bad, good = DraftControl(6), request_of([1], "bad"), request_of([1], "good")
    assert control.limits([bad, good], 2) == [6, 6]
    limits = []
    for _ in range(20):
        drafted(control, bad, 6, 0)
        drafted(control, good, 6, 6)
        limits.append(control.limits([bad, good], 2))
    of_bad = [limit for limit, _ in limits]
    assert of_bad == sorted(of_bad, reverse=True)
    assert of_bad[-1] == 0
    assert limits[-1][1] == 6
    rest = [control.limits([bad], 2)[0] for _ in range(30)]
    assert rest[0] == 0
    assert rest[-1] > 0
    stats = control.stats()
    assert (stats.num_drafts, stats.num_draft_tokens) == (40, 240)
    assert stats.accepted == (20,) * 6


def test_drafts_stop_where_a_token_costs_what_it_saves():
    cheap, dear = DraftControl(5), DraftControl(5)
    for num_tokens in (1, 4, 6, 2, 5, 1, 6):
        cheap.record_time(num_tokens, 1, 1.0 + 0.001 * num_tokens)
        dear.record_time(num_tokens, 1, 0.001 + 1.0 * num_tokens)
    request = request_of([1])
    assert cheap.limits([request], 1) == [5]
    assert dear.limits([request], 1) == [0]
    assert DraftControl(5, max_requests=3).limits([request], 4) == [0]
    assert StepCost().share_of_a_token(1) < 0.5, "nothing is known"


def test_interrupted_steps_do_not_count_for_what_they_took():
    """This includes the first steps, before any time is known."""
    cost = StepCost()
    for seconds in (0.9, 0.01, 0.01):
        cost.record(2, seconds)
    assert 0.01 <= cost.seconds(2) < 0.02
    cost.record(2, 0.9)
    assert 0.01 <= cost.seconds(2) < 0.02


def steps_with_drafts(control: DraftControl, request: Request, steps: int, seconds: float) -> int:
    """Simulate steps; return how many had drafts. A step takes 1 s, or `seconds` with drafts, two
    of which are right.
    """
    num_with_drafts = 0
    for _ in range(steps):
        limit = 0 if control.pauses(1) else control.limits([request], 1)[0]
        if limit:
            num_with_drafts += 1
            drafted(control, request, limit, 2)
        control.record_time(1 + limit, 1, seconds if limit else 1.0)
    return num_with_drafts


def test_steps_have_drafts_only_where_they_give_more_tokens_in_a_second():
    request = request_of([1])
    found = steps_with_drafts(DraftControl(4), request, 1500, 1.5)
    assert found > 0.95 * 1500, "now and then none, to measure that"
    control = DraftControl(4)
    assert 10 < steps_with_drafts(control, request, 1500, 6.0) < 0.05 * 1500, "seldom, to measure"
    steps_with_drafts(control, request, 4000, 1.5)
    assert steps_with_drafts(control, request, 1000, 1.5) > 900, "it has measured that they pay now"


def test_replays_after_drafts_do_not_make_steps_without_drafts_look_slow():
    """A step with drafts gives 3 tokens in the time of 4 steps. A step that only replays tokens
    takes as long.
    """
    control, request = DraftControl(4), request_of([1])
    num_with_drafts, has_replays = 0, False
    for _ in range(1500):
        limit = 0 if control.pauses(1) else control.limits([request], 1)[0]
        if limit:
            num_with_drafts += 1
            drafted(control, request, limit, 2)
        seconds = 4.0 if limit or has_replays else 1.0
        control.record_time(1 + limit, 1, seconds, has_replays=has_replays)
        has_replays = limit > 0
    assert 10 < num_with_drafts < 0.1 * 1500


def test_a_new_request_is_expected_to_be_like_those_before_it():
    control = DraftControl(5)
    for number in range(40):
        drafted(control, request_of([1], str(number)), 5, 0)
    assert control.limits([request_of([1], "next")], 1)[0] < 5
    for number in range(100):
        drafted(control, request_of([1], str(number)), 5, 5)
    assert control.limits([request_of([1], "last")], 1) == [5]


def test_few_poor_drafts_in_a_row_are_no_reason_to_pause_and_many_are():
    control, request = DraftControl(10), request_of([1])
    for _ in range(40):
        request.draft_evidence = 8
        limit = control.limits([request], 1, [10])[0]
        if limit:
            drafted(control, request, limit, limit)
        control.record_time(1 + limit, 1, 2.5 if limit else 1.0)
    assert limit == 10 and not control.pauses(1)
    for _ in range(20):
        request.draft_evidence = 1
        assert control.limits([request], 1, [1]) == [0], (
            "one of two is right, for 2.5 times the time"
        )
        control.record_time(1, 1, 1.0)
        request.draft_evidence = 8
        paused, found = control.pauses(1), control.limits([request], 1, [10])
        assert (paused, found) in [(False, [10]), (False, [0])]
        drafted(control, request, found[0], found[0])
        control.record_time(1 + found[0], 1, 2.5 if found[0] else 1.0)
    request.draft_evidence = 1
    for _ in range(9):
        assert control.limits([request], 1, [1]) == [0]
        control.record_time(1, 1, 1.0)
    assert control.pauses(1)


def test_drafts_behind_more_tokens_that_agree_are_expected_to_be_better():
    control, request = DraftControl(8), request_of([1])
    found = []
    for request.draft_evidence in (1, 2, 8, 20):
        found.append(control.limits([request], 1, [8])[0])
    assert found == sorted(found) and found[0] < found[-1] == found[-2] == 8
    for _ in range(20):
        request.draft_evidence = 2
        drafted(control, request, 2, 0)
    assert control.limits([request], 1, [8]) == [0]
    request.draft_evidence = 8
    assert control.limits([request], 1, [8]) == [8], "what is known of one says little of the other"


def test_an_interrupted_step_counts_as_twice_as_long_as_expected():
    cost = StepCost()
    for seconds in (1.0, 1.0, 1.0, 1.0, 60.0):
        cost.record(1, seconds)
    assert cost.seconds(1) < 1.3
