"""What ranks of one machine share while they meet, and what is left of it."""

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vllm.config import ParallelConfig
from vllm.distributed import Meeting
from vllm.errors import CollectiveError


def meetings_of_two(timeout_s: float) -> list[Meeting]:
    parallel = ParallelConfig(tensor_parallel_size=2, distributed_timeout_s=timeout_s)
    first = Meeting.create(parallel)
    assert first.arena_fd is not None
    return [first, Meeting.of(parallel, 1, first.arena_fd, first.address[1])]


def test_all_ranks_agree_on_the_least_value():
    meetings = meetings_of_two(30.0)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda each: each.least("bytes", 7 - each.rank), meetings))
    assert found == [6, 6]
    meetings[1].leave()
    meetings[0].close()


@pytest.mark.parametrize(
    "wait", [lambda each: each.least("free memory", 7), lambda each: each.join("gloo")]
)
def test_a_rank_that_does_not_come_is_named_when_time_is_up(wait):
    first, second = meetings_of_two(0.5)
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(lambda: second.store)  # it comes to the store, and then no further
        assert first.store is not None and opened.result() is not None
        message = r"exchange of .* on rank 0 failed: rank 1 did not come within 0.5 s$"
        with pytest.raises(CollectiveError, match=message):
            wait(first)
    second.leave()
    first.close()


def test_a_rank_can_ask_whether_the_others_of_its_stage_are_at_the_same_place():
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    first = Meeting.create(parallel)
    assert first.arena_fd is not None
    others = [Meeting.of(parallel, r, first.arena_fd, first.address[1]) for r in (1, 2, 3)]
    meetings = [first, *others]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda each: each.store, meetings))
    for each in meetings[:3]:
        each.arrive("launch 1")
    assert [each.is_stage_here("launch 1", 0.05) for each in meetings] == [True, True, False, False]
    for each in others:
        each.leave()
    first.close()


def test_a_store_that_outlives_its_engine_touches_no_file_of_others(tmp_path: Path):
    meetings = meetings_of_two(30.0)
    with ThreadPoolExecutor(2) as pool:
        kept = list(pool.map(lambda each: each.store, meetings))
    meetings[1].leave()
    meetings[0].close()
    files = [(tmp_path / str(n)).open("wb") for n in range(8)]  # take the numbers that are free
    del kept
    gc.collect()
    assert [os.fstat(file.fileno()).st_size for file in files] == [0] * 8
    for file in files:
        file.close()
