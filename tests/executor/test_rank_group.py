"""Test that the engine stops when the connection of a rank carries anything other than messages."""

import socket
import subprocess
from typing import Any

import pytest

from vllm.distributed import Rendezvous
from vllm.engine.arg_utils import EngineArgs
from vllm.executor.ranks import rank_group
from vllm.executor.ranks.rank_group import RankError, RankGroup
from vllm.utils.process.frames import FrameReader, frame, frame_header


class IdleProcess:
    """Runs until it is killed."""

    pid, is_killed = 4711, False

    def poll(self) -> int | None:
        return -9 if self.is_killed else None

    def wait(self, timeout: float | None = None) -> int:
        if not self.is_killed:
            raise subprocess.TimeoutExpired("rank", timeout or 0)
        return -9

    def kill(self) -> None:
        self.is_killed = True


class SilentRank:
    """A rank without a process; the test has its end of the connection."""

    last_words, is_stopped, name = None, False, "rank 1"
    theirs: socket.socket

    def __init__(self, rank: int, rendezvous: Rendezvous, *, is_copy: bool) -> None:
        self.rank, self.process = rank, IdleProcess()
        self.connection, SilentRank.theirs = socket.socketpair()
        self.reader = FrameReader(self.connection)

    def end(self) -> str:
        return "has closed its connection"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (frame_header(0, 1 << 40), r"announced a message of \d+ bytes"),
        (frame(0, b"no msgpack"), "messages cannot be read"),
        (b"", "has closed its connection"),
    ],
)
def test_what_is_no_message_ends_the_engine_and_its_calls(monkeypatch, data: bytes, reason: str):
    monkeypatch.setattr(rank_group, "ChildRank", SilentRank)
    config = EngineArgs(tensor_parallel_size=2).create_engine_config()
    rendezvous = Rendezvous.create(config.parallel)
    failed: list[Any] = []
    ranks = RankGroup(config, rendezvous, lambda: failed.append(True))
    (call,) = ranks.call("ping", [])
    with SilentRank.theirs as theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(RankError, match=reason):
            call.result(30)
    with pytest.raises(RankError, match=reason):
        ranks.check()
    ranks.close()
    rendezvous.close()
    assert failed == [True]
