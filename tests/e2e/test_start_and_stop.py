"""Test that two ranks can be started and ended many times, regularly and by failures, and leave
no resources.
"""

import gc
import os
import signal
import subprocess
import time
from dataclasses import replace
from typing import Any, NamedTuple

import psutil
import pytest

from tests.e2e.ranks import ENGINE
from tests.forked_programs import FORKS, start_programs_with
from tests.reach import pids_of_ranks
from tests.shared_memory import assert_no_new_files, named_files
from tests.tiny_models import make_tiny_model
from vllm.config import VllmConfig
from vllm.distributed import Rendezvous
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError
from vllm.executor.multiproc import MultiprocExecutor
from vllm.executor.ranks.rank_group import RankError, RankGroup


class Held(NamedTuple):
    """The resources that a process may fail to free."""

    children: frozenset[int]
    num_descriptors: int
    """Files, sockets, pipes, and shared memory without a name."""
    num_ports: int
    """That this process listens on."""
    num_threads: int

    @classmethod
    def now(cls) -> "Held":
        gc.collect()  # free what the traceback of an error still holds
        process = psutil.Process()
        connections = process.net_connections()
        return cls(
            frozenset(child.pid for child in process.children(recursive=True)),
            process.num_fds(),
            sum(each.status == psutil.CONN_LISTEN for each in connections),
            process.num_threads(),
        )

    def has_more_than(self, before: "Held") -> bool:
        """Return whether there are more resources than before. There may be fewer, because
        resources of earlier tests may be freed.
        """
        return not (
            self.children <= before.children
            and self.num_descriptors <= before.num_descriptors
            and self.num_ports <= before.num_ports
            and self.num_threads <= before.num_threads
        )


def start_and_stop(config: VllmConfig) -> None:
    executor = MultiprocExecutor(config)
    assert executor.start() == ENGINE["num_gpu_blocks_override"]
    executor.shutdown()


def start_and_lose_a_rank(config: VllmConfig) -> None:
    executor = MultiprocExecutor(config)
    executor.start()
    (pid,) = pids_of_ranks(executor)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankError, match="has ended: killed by signal 9"):
        executor.collective_rpc("sleeping_tags")
    executor.shutdown()


def fail_to_start(config: VllmConfig) -> None:
    failing = "tests.executor.failing_workers.RaisesInLoad"
    executor = MultiprocExecutor(
        replace(config, parallel=replace(config.parallel, worker_cls=failing))
    )
    with pytest.raises(ConfigError, match="no memory for the weights of this rank"):
        executor.start()


def give_up_the_start(config: VllmConfig) -> None:
    """End the ranks before they have imported torch, which takes no time."""
    start_programs_with(subprocess.Popen)  # a fork has imported it
    rendezvous = Rendezvous.create(config.parallel)
    ranks = RankGroup(config, rendezvous, rendezvous.abort)
    ranks.end(RankError("the start was given up"))
    ranks.close()
    rendezvous.close()
    start_programs_with(FORKS)


WHOLE: list[Any] = [start_and_lose_a_rank, fail_to_start, start_and_stop]


@pytest.mark.parametrize(
    ("num_rounds", "whole_every"), [(2, 2), pytest.param(200, 20, marks=pytest.mark.exhaustive)]
)
def test_nothing_is_left_of_many_starts(num_rounds, whole_every, tmp_path):
    folder = str(make_tiny_model("llama", tmp_path))
    config = EngineArgs(folder, tensor_parallel_size=2, **ENGINE).create_engine_config()
    start_and_stop(config)  # the first start also loads what a process loads only once
    held, files = Held.now(), named_files()
    for number in range(num_rounds):
        whole, rest = divmod(number, whole_every)
        run = give_up_the_start if rest else WHOLE[whole % len(WHOLE)]
        run(config)
        end = time.monotonic() + 30  # a joined thread may still be listed for a moment
        while (now := Held.now()).has_more_than(held):
            assert time.monotonic() < end, f"{now} after round {number}, {run.__name__}: {held}"
            time.sleep(0.01)
        assert_no_new_files(files)
