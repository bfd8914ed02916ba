import pytest

from tests.core.fake_runner import FakeRunner
from tests.core.helpers import Loop, check_scheduler, make_request, make_scheduler
from tests.core.reference import FAILED, expected_result
from tests.reach import preempt
from vllm.core.scheduler import logger
from vllm.errors import CapacityError, RequestError
from vllm.messages import NULL_BLOCK_ID, Finished, FinishReason


def make_loop(depth: int = 0, fails_at: dict[str, int] | None = None, **kwargs) -> Loop:
    return Loop(make_scheduler(**kwargs), depth, fails_at=fails_at)


def names(requests) -> list[str]:
    return [request.request_id for request in requests]


def running(loop: Loop) -> list[str]:
    return names(loop.scheduler.running.requests)


# ---- arrival and end of requests -----------------------------------------------------------------


def test_a_request_gets_its_tokens_and_a_reason():
    loop = make_loop()
    spec = make_request("a", 8, max_tokens=3)
    loop.add(spec)
    result = loop.run()["a"]
    assert (result.token_ids, result.finished) == expected_result(spec)
    assert result.finished == Finished(FinishReason.LENGTH)
    assert loop.num_steps == 3


def test_an_id_that_is_taken_is_refused_until_its_request_has_ended():
    loop = make_loop()
    loop.add(make_request("a"))
    with pytest.raises(RequestError, match="'a' is already"):
        loop.add(make_request("a"))
    loop.run()
    loop.add(make_request("a"))
    assert loop.run()["a"].finished


def test_a_request_that_can_never_fit_is_refused_with_both_numbers():
    loop = make_loop(num_blocks=5)
    loop.add(make_request("fits", 19, max_tokens=1))
    with pytest.raises(CapacityError, match=r"21 tokens \(6 blocks\).* 5 blocks of 4") as caught:
        loop.add(make_request("b", 19, max_tokens=2))
    assert caught.value.status == 400
    assert loop.run()["fits"].finished


@pytest.mark.parametrize(("prompt", "max_tokens"), [(0, 4), (8, 0), (120, 9)])
def test_a_length_that_could_not_run_is_refused(prompt, max_tokens):
    spec = make_request("a", prompt, max_tokens=4)
    loop = make_loop(max_model_len=128)
    with pytest.raises(RequestError, match="the limit must be above"):
        loop.add(type(spec)(**{**_fields(spec), "max_total_tokens": prompt + max_tokens}))
    assert loop.scheduler.num_unfinished_requests == 0


def _fields(spec):
    return {name: getattr(spec, name) for name in spec.__struct_fields__}


def test_aborting_unknown_finished_or_repeated_ids_is_silent():
    loop = make_loop()
    loop.add(make_request("a"), make_request("b"))
    loop.step()
    loop.abort("nobody", "a", "a")
    loop.abort("a")
    loop.run()
    loop.abort("b")
    assert loop.scheduler.num_unfinished_requests == 0


def test_an_aborted_request_frees_its_blocks_at_once_and_is_told_to_the_runner():
    loop = make_loop()
    loop.add(make_request("a"), make_request("b"))
    loop.step()
    free = loop.scheduler.cache.pool.num_free
    loop.abort("a")
    assert loop.scheduler.cache.pool.num_free == free + 2
    loop.step()
    assert [row.spec.request_id for row in loop.runner.rows.values()] == ["b"]


def test_waiting_requests_can_be_aborted_anywhere_in_the_queue():
    loop = make_loop(max_num_seqs=1)
    loop.add(*(make_request(str(i)) for i in range(200)))
    loop.step()
    loop.abort(*(str(i) for i in range(1, 199)))
    assert len(loop.scheduler.waiting) == 1
    assert names(loop.scheduler.waiting) == ["199"]
    assert loop.run()["199"].finished == Finished(FinishReason.LENGTH)


def test_rows_freed_with_nothing_left_to_run_are_told_with_the_next_step():
    loop = make_loop(depth=1)
    loop.add(make_request("a"))
    loop.run()
    assert len(loop.runner.rows) == 1, "nobody has told the runner yet"
    loop.step()
    loop.add(make_request("b"))
    loop.step()
    assert [row.spec.request_id for row in loop.runner.rows.values()] == ["b"]


# ---- order and limits -----------------------------------------------------------------------


def test_running_requests_go_before_new_prompts():
    loop = make_loop(max_num_batched_tokens=8)
    loop.add(make_request("a", 8))
    assert loop.step() == {"a": 8}
    loop.add(make_request("b", 20))
    assert loop.step() == {"a": 1, "b": 7}


def test_decodes_go_before_a_running_prefill_that_came_earlier():
    loop = make_loop(max_num_batched_tokens=8, long_prefill_token_threshold=5)
    loop.add(make_request("long", 30), make_request("b", 3))
    assert list(loop.step().items()) == [("long", 5), ("b", 3)]
    assert list(loop.step().items()) == [("b", 1), ("long", 5)]
    loop.run()


def test_first_come_first_served_though_a_later_one_would_fit():
    loop = make_loop(num_blocks=8)
    loop.add(make_request("a", 16, max_tokens=8))
    loop.step()
    loop.add(make_request("big", 20), make_request("small", 2))
    loop.step()
    assert running(loop) == ["a"]
    loop.run()


def test_no_more_requests_run_than_there_are_rows():
    loop = make_loop(max_num_seqs=2)
    loop.add(*(make_request(str(i)) for i in range(5)))
    loop.step()
    assert running(loop) == ["0", "1"]
    loop.run()


def test_without_chunking_a_prompt_waits_until_it_fits_whole():
    loop = make_loop(max_model_len=16, max_num_batched_tokens=16, enable_chunked_prefill=False)
    loop.add(make_request("a", 10), make_request("b", 10))
    assert loop.step() == {"a": 10}
    assert loop.step() == {"a": 1, "b": 10}


def test_one_prompt_is_partly_computed_at_a_time():
    loop = make_loop(
        max_num_batched_tokens=20, long_prefill_token_threshold=6, max_num_partial_prefills=1
    )
    loop.add(make_request("a", 12), make_request("b", 12), make_request("c", 2))
    assert loop.step() == {"a": 6}
    assert loop.step() == {"a": 6, "b": 6, "c": 2}


def test_as_many_prompts_are_partly_computed_as_allowed():
    loop = make_loop(
        max_num_batched_tokens=64,
        long_prefill_token_threshold=6,
        max_num_partial_prefills=3,
        max_long_partial_prefills=2,
    )
    loop.add(*(make_request(f"long {i}", 20) for i in range(3)), make_request("short", 5))
    assert loop.step() == {"long 0": 6, "long 1": 6, "short": 5}
    loop.run()


def test_a_long_prompt_that_was_passed_over_is_the_next_long_one():
    loop = make_loop(
        max_num_batched_tokens=16,
        long_prefill_token_threshold=6,
        max_num_partial_prefills=2,
        max_long_partial_prefills=1,
    )
    loop.add(make_request("long 0", 18), make_request("long 1", 18))
    order: list[str] = []
    for i in range(8):
        loop.add(make_request(f"short {i}", 5), make_request(f"late long {i}", 18))
        order += [name for name in loop.step() if name not in order]
    assert order[:2] == ["long 0", "short 0"]
    assert [name for name in order if "long" in name][:3] == ["long 0", "long 1", "late long 0"]
    loop.run()


def test_several_partial_prefills_make_four_percent_of_the_model_length_long():
    loop = make_loop(
        num_blocks=200, max_model_len=200, max_num_partial_prefills=2, max_num_batched_tokens=32
    )
    loop.add(make_request("a", 20), make_request("b", 20), make_request("c", 6))
    assert loop.step() == {"a": 8, "c": 6}


def test_a_step_looks_behind_a_bounded_number_of_long_prompts(monkeypatch):
    loop = make_loop(
        max_num_batched_tokens=64, long_prefill_token_threshold=4, max_num_partial_prefills=2
    )
    loop.add(*(make_request(f"long {i}", 40) for i in range(300)), make_request("short", 2))
    find_prefix, looked_at = loop.scheduler.cache.find_prefix, []
    monkeypatch.setattr(
        loop.scheduler.cache, "find_prefix", lambda r: looked_at.append(r) or find_prefix(r)
    )
    loop.step()
    assert running(loop) == ["long 0"]
    assert len(looked_at) < 30
    assert len(loop.scheduler.waiting) == 300


# ---- prefix caching -------------------------------------------------------------------------


def test_a_finished_request_leaves_its_prefix_to_the_next():
    loop = make_loop()
    loop.add(make_request("a", list(range(10))))
    loop.run()
    loop.add(make_request("b", [*range(10), 99]))
    assert loop.step() == {"b": 3}
    assert loop.run()["b"].num_cached_tokens == [8]


def test_requests_of_one_step_share_what_the_first_of_them_computes():
    loop = make_loop()
    loop.add(*(make_request(name, list(range(10))) for name in "abc"))
    assert loop.step() == {"a": 10, "b": 2, "c": 2}
    tables = [request.block_ids for request in loop.scheduler.running.requests]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    loop.run()


def test_sharing_within_a_step_waits_when_one_token_is_left():
    """A request with one token left would run with the decodes, before the forward pass that
    computes the shared blocks.
    """
    loop = make_loop()
    loop.add(*(make_request(name, list(range(9))) for name in "abc"))
    assert loop.step() == {"a": 9}
    assert loop.step() == {"a": 1, "b": 1, "c": 1}
    loop.run()


def test_a_prompt_in_chunks_is_findable_though_nobody_waited_for_it():
    loop = make_loop(block_size=16, max_num_batched_tokens=40)
    loop.add(make_request("a", list(range(100)), max_tokens=2))
    loop.run()
    loop.add(make_request("b", list(range(100)), max_tokens=2))
    assert loop.run()["b"].num_cached_tokens == [96]


def test_chunks_of_a_prompt_are_shared_while_it_still_runs():
    loop = make_loop(block_size=16, max_num_batched_tokens=40)
    loop.add(make_request("a", list(range(100)), max_tokens=20))
    for _ in range(3):
        loop.step()
    loop.add(make_request("b", list(range(100)), max_tokens=2))
    assert loop.step() == {"a": 1, "b": 4}
    loop.run()


def test_output_is_found_by_a_follow_up_request():
    loop = make_loop()
    loop.add(make_request("a", list(range(6)), max_tokens=7))
    output = loop.run()["a"].token_ids
    loop.add(make_request("b", [*range(6), *output, 99]))
    assert loop.run()["b"].num_cached_tokens == [12]


def test_a_cancelled_request_leaves_what_it_has_computed():
    loop = make_loop(depth=1)
    loop.add(make_request("a", list(range(6)), max_tokens=20))
    for _ in range(8):
        loop.step()
    output = loop.results["a"].token_ids
    loop.abort("a")
    loop.add(make_request("b", [*range(6), *output, 99]))
    assert loop.run()["b"].num_cached_tokens == [(6 + len(output)) // 4 * 4]


def test_the_cache_is_forgotten_only_when_nothing_runs():
    loop = make_loop()
    loop.add(make_request("a", list(range(10))))
    loop.step()
    assert not loop.scheduler.cache.pool.forget_all()
    loop.run()
    assert loop.scheduler.cache.pool.forget_all()
    loop.add(make_request("b", list(range(10))))
    assert loop.run()["b"].num_cached_tokens == [0]


def test_prefix_hits_are_reported_once_though_the_request_is_preempted():
    loop = make_loop(depth=1, num_blocks=8)
    loop.add(make_request("first", list(range(9)), max_tokens=1))
    loop.run()
    loop.add(make_request("a", 8, max_tokens=20), make_request("b", [*range(9), 8], max_tokens=8))
    results = loop.run()
    assert loop.scheduler.num_preemptions > 0
    assert results["b"].num_cached_tokens == [8]


# ---- preemption -----------------------------------------------------------------------------


def test_the_request_with_the_largest_key_makes_room():
    loop = make_loop(num_blocks=7)
    loop.add(*(make_request(name, 7, max_tokens=8) for name in "abc"))
    for _ in range(2):
        loop.step()
    assert running(loop) == ["a", "b", "c"]
    loop.step()
    assert running(loop) == ["a", "b"]
    assert names(loop.scheduler.waiting) == ["c"]
    results = loop.run()
    for name in "abc":
        spec = make_request(name, 7, max_tokens=8)
        assert (results[name].token_ids, results[name].finished) == expected_result(spec)


def test_a_preempted_request_comes_back_before_those_who_arrived_after_it():
    loop = make_loop(num_blocks=7)
    loop.add(*(make_request(name, 7, max_tokens=8) for name in "abc"))
    loop.step()
    loop.add(make_request("d", 2))
    loop.step()
    loop.step()
    assert running(loop) == ["a", "b"]
    while "d" not in running(loop):
        loop.step()
    assert "c" not in names(loop.scheduler.waiting)
    loop.run()


def test_a_token_in_flight_for_a_preempted_request_is_sampled_again():
    loop = make_loop(depth=1, num_blocks=7)
    specs = [make_request(name, 7, max_tokens=8) for name in "abc"]
    loop.add(*specs)
    results = loop.run()
    assert loop.scheduler.num_preemptions > 0
    for spec in specs:
        result = results[spec.request_id]
        assert (result.token_ids, result.finished) == expected_result(spec)


def test_a_request_that_fails_and_was_preempted_loses_no_token_before_its_error():
    spec = make_request("c", 7, max_tokens=8)
    num_discarded = 0
    for fails_at in range(8):
        loop = make_loop(depth=2, num_blocks=7, fails_at={"c": fails_at})
        loop.add(*(make_request(name, 7, max_tokens=8) for name in "ab"), spec)
        result = loop.run()["c"]
        assert (result.token_ids, result.finished) == expected_result(spec, fails_at)
        num_discarded += loop.num_discarded_errors
    assert num_discarded > 0, "no error came from a step in flight at a preemption"


def test_a_request_whose_last_token_is_in_flight_runs_no_more():
    loop = make_loop(depth=1)
    loop.add(make_request("a", 4, max_tokens=2))
    assert loop.step() == {"a": 4}
    assert loop.step() == {"a": 1}
    assert loop.step() == {}
    assert loop.results["a"].finished == Finished(FinishReason.LENGTH)


def test_admission_leaves_half_a_block_to_each_running_request():
    loop = make_loop(num_blocks=9)
    loop.add(*(make_request(name, 6, max_tokens=3) for name in "abc"))
    loop.step()
    loop.add(make_request("d", 5))
    loop.step()
    assert running(loop) == ["a", "b", "c"], "3 blocks are free, d wants 2, 2 are left alone"
    loop.run()
    assert loop.scheduler.num_preemptions == 0


def test_a_prompt_does_not_start_before_all_of_it_fits():
    loop = make_loop(num_blocks=16, max_num_batched_tokens=8)
    loop.add(make_request("a", 32, max_tokens=20))
    for _ in range(5):
        loop.step()
    loop.add(make_request("b", 30))
    loop.step()
    assert running(loop) == ["a"], "8 blocks are free, the first chunk of b needs 2, all of it 8"
    loop.run()
    assert loop.scheduler.num_preemptions == 0


def test_preemptions_are_warned_of_in_words_that_name_the_cure(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda line, *args: lines.append(line % args))
    loop = make_loop(num_blocks=7)
    loop.add(*(make_request(name, 7, max_tokens=8) for name in "abc"))
    loop.run()
    assert len(lines) == 1, "the first, then every fiftieth"
    assert lines[0].startswith("Sequence group c is preempted by PreemptionMode.RECOMPUTE mode")
    assert lines[0].endswith("total_num_cumulative_preemption=1")


# ---- priorities -----------------------------------------------------------------------------


def priority_loop(**kwargs) -> Loop:
    return make_loop(scheduling_policy="priority", **kwargs)


def test_smaller_priorities_and_then_earlier_arrivals_go_first():
    loop = priority_loop(max_num_seqs=1)
    loop.add(
        make_request("late", arrival_time=2.0),
        make_request("early", arrival_time=1.0),
        make_request("urgent", arrival_time=3.0, priority=-1),
    )
    order = []
    while loop.scheduler.num_unfinished_requests:
        order += [name for name in loop.step() if name not in order]
    assert order == ["urgent", "early", "late"]


def test_first_come_first_served_ignores_priorities():
    loop = make_loop(max_num_seqs=1)
    loop.add(make_request("a"), make_request("b", priority=-1))
    loop.step()
    loop.step()
    assert running(loop) == ["a"]


@pytest.mark.parametrize("lack", [{"max_num_seqs": 2}, {"num_blocks": 7}])
def test_an_urgent_request_takes_the_place_of_the_least_important(lack):
    loop = priority_loop(**lack)
    loop.add(make_request("a", priority=1), make_request("b", priority=2))
    loop.step()
    loop.add(make_request("urgent", 9))
    loop.step()
    loop.step()
    assert running(loop) == ["urgent", "a"]
    assert names(loop.scheduler.waiting) == ["b"]
    assert loop.scheduler.num_preemptions == 1
    results = loop.run()
    assert all(result.finished for result in results.values())


def test_nobody_is_preempted_for_a_request_that_was_cancelled_meanwhile():
    loop = priority_loop(max_num_seqs=1)
    loop.add(make_request("a", priority=1))
    loop.step()
    loop.add(make_request("urgent"))
    loop.step()
    loop.abort("urgent")
    loop.step()
    assert loop.scheduler.num_preemptions == 0


def test_requests_of_equal_priority_do_not_preempt_each_other():
    loop = priority_loop(max_num_seqs=1)
    loop.add(make_request("a", arrival_time=2.0))
    loop.step()
    loop.add(make_request("b", arrival_time=1.0))
    loop.run()
    assert loop.scheduler.num_preemptions == 0


def test_an_urgent_request_starts_at_once_on_the_blocks_of_the_one_it_drove_out():
    """These blocks are computed already, so a request with one token left need not wait. Waiting
    would stop the engine.
    """
    loop = priority_loop(max_num_seqs=1)
    loop.add(make_request("a", list(range(10)), priority=1, max_tokens=9))
    loop.step()
    loop.add(make_request("urgent", list(range(9))))
    loop.step()
    assert loop.step() == {"urgent": 1}
    loop.run()


def test_nobody_is_preempted_when_that_would_not_make_enough_room():
    loop = priority_loop(num_blocks=12)
    loop.add(make_request("vip", 24, priority=-2, max_tokens=8), make_request("a", 4, priority=1))
    loop.step()
    loop.add(make_request("urgent", 32, priority=-1))
    loop.step()
    loop.step()
    assert running(loop) == ["vip", "a"]
    loop.run()


def test_nobody_is_preempted_for_blocks_that_the_waiting_one_would_share_with_him():
    """Freeing these blocks gives no room: the waiting request already counts on them as its
    prefix.
    """
    loop = priority_loop(num_blocks=16)
    loop.add(make_request("vip", 24, priority=-2, max_tokens=8))
    loop.add(make_request("a", list(range(16)), priority=1, max_tokens=12))
    loop.step()
    loop.step()
    loop.add(make_request("urgent", list(range(36)), priority=-1))
    loop.step()
    loop.step()
    assert running(loop) == ["vip", "a"]
    loop.run()


def test_nobody_is_preempted_for_blocks_that_are_shared_anyway():
    loop = priority_loop(num_blocks=12)
    loop.add(make_request("a", list(range(30)), priority=1))
    loop.step()
    loop.add(make_request("urgent", list(range(30))))
    loop.step()
    loop.step()
    assert sorted(running(loop)) == ["a", "urgent"]
    loop.run()
    assert loop.scheduler.num_preemptions == 0


def test_a_long_prompt_that_may_not_start_yet_preempts_nobody():
    loop = priority_loop(
        max_num_seqs=2,
        max_num_batched_tokens=64,
        long_prefill_token_threshold=4,
        max_num_partial_prefills=2,
    )
    loop.add(make_request("vip", 40, priority=-2), make_request("a", 4, priority=1, max_tokens=5))
    loop.step()
    loop.add(make_request("urgent", 40, priority=-1))
    for _ in range(4):
        loop.step()
    assert loop.scheduler.num_preemptions == 0
    loop.run()


def test_less_important_requests_do_not_go_ahead_of_one_that_is_passed_over():
    loop = priority_loop(
        max_num_batched_tokens=64, long_prefill_token_threshold=4, max_num_partial_prefills=2
    )
    loop.add(
        make_request("vip", 40, priority=-2),
        make_request("urgent", 40, priority=-1),
        make_request("equal", 3, priority=-1),
        make_request("less", 3, priority=1),
    )
    loop.step()
    assert running(loop) == ["vip", "equal"]
    loop.run()


# ---- results --------------------------------------------------------------------------------


def test_the_end_token_is_silent_and_a_stop_token_is_named():
    output, _ = expected_result(make_request("a", [1, 2, 3], max_tokens=8))
    loop = make_loop()
    loop.add(
        make_request("eos", [1, 2, 3], max_tokens=8, eos=output[1]),
        make_request("stop", [1, 2, 3], max_tokens=8, stop={output[1]}),
    )
    results = loop.run()
    end = output.index(output[1]) + 1
    assert results["eos"].token_ids == results["stop"].token_ids == output[:end]
    assert results["eos"].finished == Finished(FinishReason.STOP)
    assert results["stop"].finished == Finished(FinishReason.STOP, output[1])


def test_an_end_token_in_the_last_place_is_a_stop():
    (token_id,), _ = expected_result(make_request("a", [1, 2, 3], max_tokens=1))
    loop = make_loop()
    loop.add(make_request("a", [1, 2, 3], max_tokens=1, eos=token_id))
    assert loop.run()["a"].finished == Finished(FinishReason.STOP)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failed_row_ends_its_own_request_only(depth):
    loop = make_loop(depth, fails_at={"b": 2})
    loop.add(*(make_request(name, 6, max_tokens=4) for name in "abc"))
    results = loop.run()
    assert results["b"].finished == Finished(FinishReason.ERROR, error=FAILED)
    assert len(results["b"].token_ids) == 2
    for name in "ac":
        assert len(results[name].token_ids) == 4


def test_the_failure_of_a_cancelled_request_hits_nobody():
    loop = make_loop(depth=1, max_num_seqs=1, fails_at={"a": 0})
    loop.add(make_request("a"), make_request("b"))
    loop.step()
    loop.abort("a")
    loop.step()  # the failure of a arrives when b has the batch row of a
    assert running(loop) == ["b"]
    assert loop.run()["b"].finished == Finished(FinishReason.LENGTH)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_that_fails_leaves_no_block_of_its_prompt_in_the_prefix_cache(depth):
    loop = make_loop(depth, fails_at={"bad": 0, "shares": 1})
    loop.add(make_request("bad", [*range(16)]))
    loop.run()
    loop.add(make_request("next", [*range(16), 99]))
    loop.run()
    assert loop.results["next"].num_cached_tokens == [0]
    # A failure may come from the blocks that the request shares, so these leave the prefix cache
    # too.
    loop.add(make_request("shares", [*range(16), 99, 98]))
    loop.run()
    assert loop.results["shares"].num_cached_tokens == [16]
    loop.add(make_request("last", [*range(16), 99]))
    loop.run()
    assert loop.results["last"].num_cached_tokens == [0]


def test_nothing_of_a_cancelled_request_arrives_later():
    loop = make_loop(depth=1)
    loop.add(make_request("a", prompt_logprobs=0, logprobs=0))
    loop.step()
    loop.abort("a")
    loop.add(make_request("a", prompt_logprobs=0))
    loop.run()
    assert len(loop.results["a"].num_cached_tokens) == 1
    assert len(loop.results["a"].prompt_logprobs) == 7


def test_an_output_belongs_to_whoever_receives_it():
    scheduler = make_scheduler()
    specs = [make_request(name, 6) for name in "ab"]
    runner, received = FakeRunner(scheduler.cache.block_size), []
    for spec in specs:
        scheduler.add_request(spec)
    while scheduler.num_unfinished_requests:
        output = scheduler.update(runner.execute(scheduler.schedule()))
        received += list(zip(output.request_ids, output.token_ids, strict=True))
        output.request_ids.clear()
        output.token_ids.clear()
    for spec in specs:
        tokens = [token_id for name, token_id in received if name == spec.request_id]
        assert tokens == expected_result(spec)[0]


def test_results_for_an_earlier_stay_in_the_same_row_are_dropped():
    """With two steps in flight, a request can leave and return to the same batch index before a
    result arrives.
    """
    loop = make_loop(depth=2, num_blocks=6)
    specs = [make_request("a", 7, max_tokens=3), make_request("b", 7, max_tokens=8)]
    loop.add(*specs)
    scheduler = loop.scheduler
    loop.step()
    loop.step()
    (b,) = (r for r in scheduler.running.requests if r.request_id == "b")
    row = b.row
    preempt(scheduler, b)
    loop.step()
    assert b.row == row, "this is what the test is about"
    results = loop.run()
    for spec in specs:
        result = results[spec.request_id]
        assert (result.token_ids, result.finished) == expected_result(spec)


@pytest.mark.parametrize("depth", [0, 1])
def test_prompt_logprobs_come_once_and_complete_though_the_prompt_is_computed_twice(depth):
    loop = make_loop(depth, num_blocks=10, long_prefill_token_threshold=3)
    spec = make_request("b", 18, max_tokens=4, prompt_logprobs=0)
    loop.add(make_request("a", 16, max_tokens=16), spec)
    results = loop.run()
    assert loop.scheduler.num_preemptions > 0
    assert results["b"].prompt_logprobs == list(enumerate(spec.prompt_token_ids[1:]))
    assert results["b"].token_ids == expected_result(spec)[0]


def test_prompt_logprobs_of_a_request_with_a_single_token_of_output():
    loop = make_loop()
    spec = make_request("a", 6, max_tokens=1, prompt_logprobs=0, logprobs=0)
    loop.add(spec)
    result = loop.run()["a"]
    assert len(result.prompt_logprobs) == 5
    assert len(result.logprobs) == 1


def test_results_out_of_order_are_a_bug():
    loop = make_loop(depth=1)
    loop.add(make_request("a"))
    loop.step()
    loop.step()
    loop.in_flight.reverse()
    loop.in_flight.append(loop.in_flight.popleft())
    output = loop.in_flight[0]
    wrong = type(output)(step_id=output.step_id + 7, rows=output.rows, token_ids=output.token_ids)
    with pytest.raises(AssertionError, match="out of order"):
        loop.scheduler.update(wrong)


def test_an_idle_scheduler_schedules_nothing():
    loop = make_loop()
    step = loop.scheduler.schedule()
    assert step.num_tokens == 0 and not len(step.rows) and not step.new_requests
    check_scheduler(loop.scheduler)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_layer_with_a_window_holds_no_more_blocks_than_its_window_needs(depth):
    loop = make_loop(depth, windows=(None, 6), num_blocks=64)
    loop.add(make_request("a", 3, max_tokens=60))
    most = [0, 0]
    while loop.scheduler.num_unfinished_requests:
        loop.step()
        for request in loop.scheduler.running.requests:
            tables = request.block_ids, *request.more_block_ids
            held = [len(table) - table.count(NULL_BLOCK_ID) for table in tables]
            most = [max(pair) for pair in zip(most, held, strict=True)]
    # 6 tokens can lie in 3 blocks of 4 tokens. A step in flight holds one more block for a short
    # time.
    assert most == [16, 3] or (depth and most == [16, 4])
    loop.run()


def test_several_groups_take_their_blocks_together_or_not_at_all():
    loop = make_loop(windows=(None, 6), num_blocks=10)
    assert loop.scheduler.cache.num_blocks_for(20) == 10
    loop.add(make_request("a", 8, max_tokens=12), make_request("b", 8, max_tokens=12))
    loop.run()
    assert loop.scheduler.num_preemptions
    with pytest.raises(CapacityError, match=r"21 tokens \(12 blocks\).*10 blocks of 4 tokens"):
        loop.add(make_request("c", 8, max_tokens=13))
