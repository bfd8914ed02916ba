"""Test the images of requests: which steps encode them, and how long their embeddings are kept."""

import msgspec
import numpy as np
import pytest

from tests.core.helpers import Loop, make_request, make_scheduler, num_scheduled
from vllm.core.media import EncoderCache
from vllm.errors import CapacityError
from vllm.messages import END_OF_REQUEST, FinishReason, ModelRunnerOutput


def loop_of(capacity=16, budget=8, **limits):
    media = EncoderCache(capacity, budget, most_whole=limits.pop("most_whole", None))
    return Loop(make_scheduler(media=media, **limits))


def test_a_prompt_runs_up_to_the_image_that_the_budget_leaves_to_the_next_step():
    loop = loop_of()
    loop.add(make_request("a", 20, media=[(2, 6, "x"), (10, 6, "y")]))
    assert loop.step() == {"a": 10}
    assert loop.runner.images == {"x": 6}
    assert loop.step() == {"a": 10}
    assert loop.runner.images == {"x": 6, "y": 6}


def test_a_request_waits_for_an_image_at_its_start_while_others_run():
    loop = loop_of()
    loop.add(
        make_request("a", 8, media=[(0, 8, "x")]),
        make_request("b", 8, media=[(0, 8, "y")]),
        make_request("c", 4),
    )
    assert loop.step() == {"a": 8}
    assert loop.step() == {"a": 1, "b": 8, "c": 4}


def test_the_same_image_of_several_requests_is_encoded_once_in_a_step_and_later():
    loop = loop_of(enable_caching=False)
    requests = [make_request(str(i), 8, media=[(i, 4, "x")]) for i in range(3)]
    loop.add(*requests[:2])
    assert loop.step() == {"0": 8, "1": 8}
    loop.add(requests[2])
    loop.run()
    assert loop.runner.num_encoded == 1
    media = loop.scheduler.media
    assert (media.num_queries, media.num_hits) == (3, 2)


def parts_of(loop, step):
    """Return the parts of images that a step encodes, by key."""
    del loop.runner.parts[:]
    step()
    return loop.runner.parts


def test_a_long_image_is_encoded_in_parts_while_others_decode():
    loop = loop_of(budget=5, capacity=24)
    loop.add(make_request("a", 4, max_tokens=20))
    loop.step()
    # 12 embeddings in 6 parts: two parts fit into the budget of a step.
    loop.add(make_request("b", 20, media=[(3, 12, "x", 6)]), make_request("c", 4, max_tokens=1))
    found = []
    for _ in range(4):
        parts = parts_of(loop, lambda: found.append(loop.step()))
        found.append(list(parts))
    assert found == [
        *({"a": 1, "b": 3, "c": 4}, [("x", 0, 2)]),
        *({"a": 1}, [("x", 2, 4)]),
        *({"a": 1, "b": 17}, [("x", 4, 6)]),
        *({"a": 1, "b": 1}, []),
    ]


def test_an_image_runs_whole_where_nobody_waits_for_a_token():
    loop = loop_of(budget=5, capacity=24)
    loop.add(make_request("b", 20, media=[(3, 12, "x", 6)]))
    assert parts_of(loop, loop.step) == [("x", 0, 6)]
    loop = loop_of(budget=5, capacity=24)
    loop.add(make_request("a", 4, max_tokens=2))
    loop.step()
    loop.add(make_request("b", 20, media=[(3, 12, "x", 6)]))
    assert parts_of(loop, loop.step) == [("x", 0, 2)]
    assert parts_of(loop, loop.step) == [("x", 2, 6)]


@pytest.mark.parametrize("kind", ["media", "seen"])
def test_a_request_whose_first_token_needs_a_long_image_enters_without_tokens(kind):
    loop = loop_of(budget=5, capacity=24)
    loop.add(make_request("a", 4, max_tokens=20))
    loop.step()
    item = (0, 12, "x", 3) if kind == "media" else (0, END_OF_REQUEST, 12, "x", 3)
    loop.add(make_request("b", 20, **{kind: [item]}), make_request("c", 4, max_tokens=1))
    steps = []
    for _ in range(3):
        assert len(parts_of(loop, lambda: steps.append(loop.step()))) == 1
    assert steps == [{"a": 1, "c": 4}, {"a": 1}, {"a": 1, "b": 20}]


def test_parts_of_an_image_are_dropped_with_the_last_request_that_waits_for_it():
    loop = loop_of(budget=4, capacity=12)
    loop.add(make_request("a", 4, max_tokens=20))
    loop.step()
    loop.add(*(make_request(name, 16, media=[(0, 12, "x", 3)]) for name in "bc"))
    loop.step()
    loop.abort("b")
    assert parts_of(loop, loop.step) == [("x", 0, 1)], "nobody held it"
    assert parts_of(loop, loop.step) == [("x", 1, 2)]
    assert loop.step() == {"a": 1, "c": 16}
    assert loop.runner.images == {"x": 12}


def test_images_that_are_used_stay_and_the_least_recently_used_leaves():
    loop = loop_of(capacity=12, enable_caching=False)
    for name, key in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "z")):
        loop.add(make_request(name, 8, max_tokens=1, media=[(0, 5, key)]))
        loop.run()
    assert set(loop.runner.images) == {"x", "z"}
    assert loop.runner.num_encoded == 3


def test_an_image_behind_cached_blocks_is_not_encoded_again():
    loop = loop_of(capacity=8)
    prompt = list(range(8, 20))
    loop.add(make_request("a", prompt, max_tokens=1, media=[(1, 6, "x")]))
    loop.run()
    loop.add(make_request("b", 8, max_tokens=1, media=[(0, 8, "y")]))
    loop.run()  # drops image x from the encoder cache
    loop.add(make_request("c", prompt, max_tokens=1, media=[(1, 6, "x")]))
    loop.run()
    assert loop.results["c"].num_cached_tokens == [8]
    assert loop.runner.num_encoded == 2
    loop.add(make_request("d", prompt, max_tokens=1, media=[(1, 6, "other")]))
    loop.run()
    assert loop.results["d"].num_cached_tokens == [0]


@pytest.mark.parametrize("start", range(6))
def test_no_step_ends_inside_of_an_image_whose_tokens_depend_on_each_other(start):
    loop = loop_of(most_whole=6, max_num_seqs=1, max_num_batched_tokens=6)
    loop.add(make_request("a", 16, media=[(start, 5, "x")]))
    computed = 0
    while computed < 16:
        scheduled = loop.step()
        computed += scheduled["a"]
        assert not start < computed < start + 5


def test_what_a_prefix_hit_leaves_of_an_image_runs_in_one_step():
    loop = loop_of(most_whole=8, max_num_batched_tokens=10, block_size=4)
    prompt = list(range(2, 20))
    loop.add(make_request("a", prompt, max_tokens=1, media=[(2, 8, "x")]))
    loop.run()
    loop.add(make_request("b", [*prompt[:8], 1, *prompt[9:]], max_tokens=1, media=[(2, 8, "x")]))
    loop.add(make_request("c", 8, max_tokens=1))
    found = loop.step()
    assert loop.results["b"].num_cached_tokens in ([], [8])
    assert found["b"] >= 2
    with pytest.raises(
        CapacityError, match=r"has 9 tokens, but at most 8 fit.*--max-num-batched-tokens"
    ):
        loop.add(make_request("d", 16, media=[(0, 9, "y")]))


def test_an_aborted_or_failed_request_lets_go_and_failed_images_are_made_again():
    loop = Loop(
        make_scheduler(media=EncoderCache(8, 8), max_num_batched_tokens=8), fails_at={"f": 0}
    )
    loop.add(make_request("a", 16, media=[(4, 8, "x")]))
    loop.step()
    loop.abort("a")
    loop.add(make_request("f", 4, media=[(0, 4, "y")]))
    loop.run()
    loop.add(make_request("b", 4, max_tokens=1, media=[(0, 4, "y")]))
    loop.run()
    assert loop.runner.num_encoded == 3
    assert set(loop.runner.images) == {"y"}


def test_an_image_that_can_never_be_kept_is_refused_with_both_numbers():
    loop = loop_of(capacity=8)
    request = make_request("a", 16, media=[(0, 4, "y"), (4, 9, "x")])
    with pytest.raises(CapacityError, match=r"^an image has 9 embeddings, .* at most 8"):
        loop.add(request)
    items = [
        msgspec.structs.replace(item, where=f"messages[2].content[{index}]")
        for index, item in enumerate(request.media)
    ]
    with pytest.raises(CapacityError, match=r"^messages\[2\]\.content\[1\]: an image has"):
        loop.add(msgspec.structs.replace(request, media=tuple(items)))


def test_clearing_drops_what_nobody_holds():
    loop = loop_of(capacity=16, max_num_batched_tokens=8)
    loop.add(make_request("a", 8, max_tokens=1, media=[(0, 4, "x")]))
    loop.run()
    loop.add(make_request("b", 16, media=[(0, 8, "y"), (9, 3, "z")]))
    loop.step()
    loop.scheduler.media.clear()
    step = loop.scheduler.schedule()
    assert num_scheduled(loop.scheduler, step) == {"b": 8}
    assert step.dropped_media == ["x"]


def failed(scheduler, step, *request_ids):
    """Return the result of a step in which images of these requests could not be encoded."""
    row_of = {each.request_id: each.row for each in scheduler.running.at(step.rows)}
    ends = scheduler.running.num_tokens[step.rows] - 1
    samples = step.num_computed_tokens + step.num_scheduled_tokens >= ends
    rows = step.rows[samples]
    return ModelRunnerOutput(
        step_id=step.step_id,
        rows=rows,
        token_ids=np.full(len(rows), 5, np.int32),
        errors={row_of[name]: "broken" for name in request_ids},
    )


def cached_of(scheduler, prompt, key):
    """Return the number of cached tokens of a new request with this prompt."""
    scheduler.add_request(make_request("new", prompt, media=[(1, 6, key)]))
    step = scheduler.schedule()
    return int(step.num_computed_tokens[-1])


@pytest.mark.parametrize("budget", [8, 128])
def test_a_request_whose_image_fails_ends_at_once_and_leaves_nothing_to_share(budget):
    scheduler = make_scheduler(media=EncoderCache(16, 8), max_num_batched_tokens=budget)
    prompt = list(range(20))
    scheduler.add_request(make_request("a", prompt, media=[(1, 6, "x")]))
    step = scheduler.schedule()
    output = scheduler.update(failed(scheduler, step, "a"))
    assert output.finished["a"].reason is FinishReason.ERROR
    assert not output.request_ids
    assert cached_of(scheduler, prompt, "x") == 0


def test_a_request_that_leaves_while_its_image_fails_leaves_nothing_to_share():
    scheduler = make_scheduler(media=EncoderCache(16, 8))
    prompt = list(range(20))
    scheduler.add_request(make_request("a", prompt, media=[(1, 6, "x")]))
    result = failed(scheduler, scheduler.schedule(), "a")
    scheduler.abort_requests(["a"])
    assert not scheduler.update(result).finished
    assert cached_of(scheduler, prompt, "x") == 0


def test_a_request_that_shares_blocks_of_a_failed_image_runs_again():
    scheduler = make_scheduler(media=EncoderCache(16, 16))
    prompt = list(range(20))
    for name, key in (("a", "x"), ("b", "x"), ("c", "y")):
        scheduler.add_request(make_request(name, prompt, media=[(1, 6, key)]))
    step = scheduler.schedule()
    assert num_scheduled(scheduler, step) == {"a": 20, "b": 4, "c": 20}
    output = scheduler.update(failed(scheduler, step, "a"))
    assert list(output.finished) == ["a"]
    assert output.request_ids == ["c"]
    step = scheduler.schedule()
    assert num_scheduled(scheduler, step) == {"b": 20, "c": 1}
    assert step.dropped_media == ["x"]
    assert step.encoded_media == [(int(step.new_requests[0].row), 0, 0, 1)]


@pytest.mark.parametrize("num_requests", [2, 3])
def test_requests_with_the_same_failed_image_end_although_they_run_in_different_steps(num_requests):
    scheduler = make_scheduler(media=EncoderCache(16, 8), num_stages=2)
    prompt, ended, results = list(range(20)), [], []
    for name in ("a", "b", "c")[:num_requests]:
        scheduler.add_request(make_request(name, prompt, media=[(1, 6, "x")]))
        step = scheduler.schedule()
        results.append(failed(scheduler, step, name))
    for _ in range(5):
        if results:
            ended += scheduler.update(results.pop(0)).finished
        # Requests that shared blocks with a failed request have been preempted, and run again here.
        step = scheduler.schedule()
        if len(step.rows):
            names = [request.request_id for request in scheduler.running.at(step.rows)]
            results.append(failed(scheduler, step, *names))
    assert sorted(ended) == ["a", "b", "c"][:num_requests]
    assert not scheduler.num_unfinished_requests


def test_a_request_holds_what_cross_attention_reads_until_it_leaves():
    loop = loop_of(capacity=12, budget=100)
    loop.add(make_request("a", 8, max_tokens=4, seen=[(2, END_OF_REQUEST, 8, "x")]))
    loop.add(make_request("b", 8, max_tokens=1, seen=[(0, END_OF_REQUEST, 8, "y")]))
    assert [loop.step() for _ in range(4)] == [{"a": 8}, {"a": 1}, {"a": 1}, {"a": 1}]
    assert loop.runner.images == {"x": 8}
    assert loop.step() == {"b": 8}
    assert loop.runner.images == {"y": 8}


def test_a_request_is_admitted_when_all_of_its_items_fit_together():
    loop = loop_of(capacity=12, budget=4, max_num_batched_tokens=8)
    x = (0, END_OF_REQUEST, 6, "x")
    for name, *others in (("a",), ("b", (1, 3, "y"), (7, 3, "z")), ("c", (1, 6, "w"))):
        seen = [x, *((start, END_OF_REQUEST, count, key) for start, count, key in others)]
        loop.add(make_request(name, 8, max_tokens=2, seen=seen))
    assert loop.step() == {"a": 8}
    assert loop.step() == {"a": 1}
    assert loop.runner.images == {"x": 6, "y": 3}, "a waits for its token, so z is for another step"
    assert loop.step() == {"b": 8}
    assert loop.runner.images == {"x": 6, "y": 3, "z": 3}
    assert loop.step() == {"b": 1}
    assert loop.step() == {"c": 8}
    assert loop.runner.images == {"x": 6, "w": 6}
    twice = [(0, 1, 7, "v"), (2, 3, 7, "v"), (4, 5, 6, "x")]
    with pytest.raises(CapacityError, match=r"have 13 hidden states, .* at most 12"):
        loop.add(make_request("d", 8, seen=twice))


def test_requests_that_see_the_same_item_share_it_and_run_together():
    loop = loop_of(capacity=6, budget=6)
    loop.add(*(make_request(name, 8, seen=[(0, END_OF_REQUEST, 6, "x")]) for name in "abc"))
    assert loop.step() == {"a": 8, "b": 8, "c": 8}
    assert loop.scheduler.media.stats().num_hits == 2


def test_the_items_of_one_request_may_exceed_the_budget_of_a_step():
    loop = loop_of(capacity=30, budget=8)
    sizes = {"a": [5, 6], "b": [4], "c": [4]}
    for name, counts in sizes.items():
        seen = [(0, END_OF_REQUEST, count, f"{name}{count}") for count in counts]
        loop.add(make_request(name, 4, seen=seen))
    assert loop.step() == {"a": 4}
    assert loop.step() == {"a": 1, "b": 4, "c": 4}


def test_an_item_that_only_tokens_of_a_cached_prefix_see_is_not_needed():
    loop = loop_of(capacity=12)
    prompt = list(range(100, 112))
    first = (0, 8, 6, "x")
    loop.add(make_request("a", prompt[:9], max_tokens=1, seen=[first]))
    loop.run()
    loop.add(make_request("b", 8, max_tokens=1, seen=[(0, END_OF_REQUEST, 12, "y")]))
    loop.run()  # drops image x from the encoder cache
    loop.add(make_request("c", prompt, max_tokens=1, seen=[first, (8, 12, 6, "z")]))
    assert loop.step() == {"c": 4}
    assert loop.runner.images == {"z": 6}
