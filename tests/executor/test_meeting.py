"""What ranks of one machine share while they meet, and what is left of it."""

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vllm.config import ParallelConfig
from vllm.distributed import Meeting


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


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_time_out():
    first, _ = meetings_of_two(0.2)
    with pytest.raises(RuntimeError):
        first.least("bytes", 7)
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
