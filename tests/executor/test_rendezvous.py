"""Test the rendezvous of ranks on one machine: what they exchange, and that nothing is left."""

import contextlib
import gc
import os
import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from vllm.config import ParallelConfig
from vllm.distributed import Rendezvous
from vllm.distributed.store import own_sockets
from vllm.errors import CollectiveError
from vllm.utils.process.blocking_sockets import set_socket_timeouts_of

PARALLEL = ParallelConfig(tensor_parallel_size=2, distributed_timeout_s=60.0)


def meetings_of_two() -> list[Rendezvous]:
    first = Rendezvous.create(PARALLEL)
    assert first.arena_fd is not None
    return [first, Rendezvous.of(PARALLEL, 1, first.arena_fd, first.address[1])]


def lose_patience(rendezvous: Rendezvous) -> None:
    """Reduce the time that a rank waits to 0.5 s. Not earlier, because a busy machine may need
    longer to connect.
    """
    rendezvous.store.set_timeout(timedelta(seconds=0.5))
    rendezvous.timeout_s = 0.5
    for descriptor in own_sockets():
        with contextlib.suppress(OSError):
            set_socket_timeouts_of(descriptor, rendezvous.address[1], socket.SO_RCVTIMEO, 0.5)


def test_all_ranks_agree_on_the_least_value():
    meetings = meetings_of_two()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda each: each.minimum("bytes", 7 - each.rank), meetings))
    assert found == [6, 6]
    meetings[1].leave()
    meetings[0].close()


@pytest.mark.parametrize(
    "wait", [lambda each: each.minimum("free memory", 7), lambda each: each.join("gloo")]
)
def test_a_rank_that_does_not_come_is_named_when_time_is_up(wait):
    first, second = meetings_of_two()
    with ThreadPoolExecutor(1) as pool:
        # Rank 1 opens the store, but never joins the exchange.
        opened = pool.submit(lambda: second.store)
        assert first.store is not None and opened.result() is not None
        lose_patience(first)
        message = r"exchange of .* on rank 0 failed: rank 1 did not arrive within 0.5 s$"
        with pytest.raises(CollectiveError, match=message):
            wait(first)
    second.leave()
    first.close()


def second_of_two(port: int) -> Rendezvous:
    return Rendezvous.at(PARALLEL, 1, ("127.0.0.1", port), is_host=False)


def test_a_rank_that_nobody_answers_says_so_when_time_is_up():
    with socket.create_server(("127.0.0.1", 0)) as other:  # another program has the port
        port = other.getsockname()[1]
        message = rf"^connection with .* on rank 1 failed: .* at 127.0.0.1:{port} has not answered"
        with pytest.raises(CollectiveError, match=message):
            second = second_of_two(port)
            second.timeout_s = 0.5
            second.minimum("free memory", 7)


class Wire:
    """A connection to a port that can be cut without informing either end.

    Attributes:
        port: port to which clients connect.
    """

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._far = socket.create_connection(("127.0.0.1", port))
        self._end, self._ended = socket.socketpair()
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def _carry(self) -> None:
        near = self._listener.accept()[0]
        ends = {near: self._far, self._far: near}
        with near:
            while self._ended not in (ready := select.select([*ends, self._ended], [], [])[0]):
                for end in ready:
                    ends[end].sendall(end.recv(65536))
            self._ended.recv(1)
            self._ended.recv(1)  # both ends of the connection stay open, and no data arrives

    def cut(self) -> None:
        """Cut the connection: from now on no data arrives."""
        self._end.sendall(b"c")

    def close(self) -> None:
        """Close both ends."""
        self._end.close()
        self._thread.join()
        for each in (self._listener, self._far, self._ended):
            each.close()


@pytest.fixture
def wire() -> Iterator[tuple[Rendezvous, Wire]]:
    """Return the rendezvous of a rank that reaches rank 0 through a wire."""
    first, _ = meetings_of_two()
    assert first.store is not None
    found = Wire(first.address[1])
    yield second_of_two(found.port), found
    found.close()
    first.close()


@pytest.mark.parametrize(
    "use",
    [
        lambda each: each.minimum("free memory", 7),
        lambda each: each.store.delete_key("1/result"),
    ],
    ids=["wait for a key", "answer to a call"],
)
def test_a_rank_whose_host_is_not_reached_any_more_says_so_when_time_is_up(wire, use):
    rendezvous, connection = wire
    rendezvous.arrive("start")
    assert rendezvous.store.check(["start/1"])
    lose_patience(rendezvous)
    connection.cut()
    with pytest.raises((CollectiveError, torch.distributed.DistError)) as found:
        use(rendezvous)
    error = found.value
    text = rendezvous.reason_of(error) if isinstance(error, torch.distributed.DistError) else error
    assert f"at 127.0.0.1:{connection.port} has not answered within 0.5 s" in str(text)
    rendezvous.leave()


def test_a_rank_can_ask_whether_the_others_of_its_stage_are_at_the_same_place():
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    first = Rendezvous.create(parallel)
    assert first.arena_fd is not None
    others = [Rendezvous.of(parallel, r, first.arena_fd, first.address[1]) for r in (1, 2, 3)]
    meetings = [first, *others]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda each: each.store, meetings))
    for each in meetings[:3]:
        each.arrive("launch 1")
    patience_s = (120.0, 120.0, 0.05, 0.05)  # a rank that waits in vain spends all of its time
    found = [
        each.is_stage_here("launch 1", seconds)
        for each, seconds in zip(meetings, patience_s, strict=True)
    ]
    assert found == [True, True, False, False]
    for each in others:
        each.leave()
    first.close()


def test_a_store_that_outlives_its_engine_touches_no_file_of_others(tmp_path: Path):
    meetings = meetings_of_two()
    with ThreadPoolExecutor(2) as pool:
        kept = list(pool.map(lambda each: each.store, meetings))
    meetings[1].leave()
    meetings[0].close()
    # Open files, which take the free numbers of file descriptors.
    files = [(tmp_path / str(n)).open("wb") for n in range(8)]
    del kept
    gc.collect()
    assert [os.fstat(file.fileno()).st_size for file in files] == [0] * 8
    for file in files:
        file.close()
