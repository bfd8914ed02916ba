"""Test that a server with two ranks can be started and ended many times, in different ways, and
leaves no resources.

It must leave no process, port, file, shared memory, semaphore or block. `python -m
tests.e2e.test_rounds_of_servers 200` runs 200 rounds.
"""

import asyncio
import itertools
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.server import Server, start_server, wait_until
from tests.e2e.test_restart_parallel import ranks
from tests.e2e.test_server_faults import LONG, SHORT, answers_around, send_all
from tests.shared_memory import assert_no_new_files, named_files

pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]

FLAGS = ("-tp", "2", "--max-model-len", "512", "--kv-cache-memory-bytes", "64M")
BODY = {**LONG, "max_tokens": 400}
LOAD = [{**BODY, "stream": index % 2 == 1} for index in range(6)]
CAUSES = {
    "kill_a_rank": "has ended: killed by signal 9",
    "kill_the_engine": "signal 9",
    "stop_a_rank": "is stopped (SIGSTOP)",
    "stop_the_engine": "was stopped by a signal (SIGSTOP)",
}
"""Message that every request gets, as an error or as the last event of its stream."""
MARK = "TEST_OF_ROUNDS"
"""A variable that all processes of a round inherit."""
_ROUNDS = itertools.count()


def processes_of(mark: str) -> list[psutil.Process]:
    """Return all processes with this mark in their environment, whoever their parent is."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        if environment.get(MARK) == mark:
            found.append(process)
    return found


def system_v_memory() -> set[str]:
    """Return the shared memory, semaphores and queues of System V."""
    found = set()
    for kind in ("shm", "sem", "msg"):
        table = Path(f"/proc/sysvipc/{kind}").read_text()
        found |= {f"{kind} {line}" for line in table.splitlines()}
    return found


def under_load(act: Callable[[Server], None]) -> Callable[[Server], None]:
    """Return a way to end the server: run `act` during a load, and check that every request gets an
    answer.
    """

    def end(server: Server) -> None:
        answers = asyncio.run(answers_around(server, LOAD, lambda: act(server)))
        cause = CAUSES.get(act.__name__, "")
        assert all(cause in text for _, text in answers), answers

    end.__name__ = act.__name__
    return end


def stop_cleanly(server: Server) -> None:
    """Stop the server by a signal after clients have left and their blocks are free."""
    asyncio.run(send_all(server, [{**BODY, "stream": True}] * 4, num_events=2))
    server.wait_until_idle()
    server.send_signal(random.choice([signal.SIGTERM, signal.SIGINT]))
    assert server.wait_for_exit() == 0


@under_load
def stop_under_load(server: Server) -> None:
    server.send_signal(signal.SIGTERM)


@under_load
def kill_a_rank(server: Server) -> None:
    ranks(server)[0].kill()


@under_load
def kill_the_engine(server: Server) -> None:
    server.engine_process().kill()


@under_load
def stop_the_engine(server: Server) -> None:
    server.engine_process().suspend()


@under_load
def stop_a_rank(server: Server) -> None:
    ranks(server)[0].suspend()


def kill_the_front_end(server: Server) -> None:
    async def kill() -> None:
        begun = asyncio.Event()
        kept = asyncio.ensure_future(
            send_all(server, [{**BODY, "stream": True}] * 2, on_status=begun.set)
        )
        await begun.wait()
        server.send_signal(signal.SIGKILL)
        await kept

    asyncio.run(kill())


def kill_a_front_end_whose_engine_is_stopped(server: Server) -> None:
    server.children()
    server.engine_process().suspend()
    server.send_signal(signal.SIGKILL)


def kill_a_front_end_whose_rank_is_stopped(server: Server) -> None:
    ranks(server)[0].suspend()
    server.send_signal(signal.SIGKILL)


def kill_all_in_any_order(server: Server) -> None:
    found = [psutil.Process(server.process.pid), *server.children()]
    random.shuffle(found)
    for process in found:
        process.kill()


def restart_after_a_killed_rank(server: Server) -> None:
    """Kill a rank. The ranks are started again and serve, without a block of the lost requests."""
    asyncio.run(answers_around(server, LOAD, ranks(server)[0].kill))
    assert server.request("POST", "/v1/completions", SHORT)[0] == 200
    stop_cleanly(server)


def end_in_the_start(server: Server) -> None:
    time.sleep(random.uniform(0.1, 7))
    server.send_signal(random.choice([signal.SIGKILL, signal.SIGTERM]))


WAYS = [
    stop_cleanly,
    kill_a_rank,
    kill_the_engine,
    kill_the_front_end,
    stop_a_rank,
    stop_under_load,
    stop_the_engine,
    kill_a_front_end_whose_engine_is_stopped,
    kill_a_front_end_whose_rank_is_stopped,
    kill_all_in_any_order,
    restart_after_a_killed_rank,
    end_in_the_start,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_nothing_is_left_of_a_server(way):
    files, before = named_files(), system_v_memory()
    mark = f"{os.getpid()}-{next(_ROUNDS)}"
    flags = [*FLAGS, "--distributed-timeout-s", "5"]
    if way is restart_after_a_killed_rank:
        flags += ["--restart-engine", "1"]
    is_awaited = way is not end_in_the_start
    with start_server(
        *flags, variables={MARK: mark}, is_awaited=is_awaited, is_fork=False
    ) as server:
        way(server)
        server.wait_for_exit()
        wait_until(lambda: not processes_of(mark))
        assert not list(server.scratch.iterdir())
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", server.port))
    assert system_v_memory() <= before
    assert_no_new_files(files)


def main(num_rounds: int) -> None:
    """Run rounds, and continue after one that fails."""
    num_failed = 0
    for number in range(num_rounds):
        way, started = WAYS[number % len(WAYS)], time.monotonic()
        random.seed(number)
        try:
            test_nothing_is_left_of_a_server(way)
            result = "nothing is left"
        except Exception:
            num_failed += 1
            result = traceback.format_exc()
        print(f"{number} {way.__name__} {time.monotonic() - started:.1f} s: {result}", flush=True)
    sys.exit(f"{num_failed} of {num_rounds} rounds have failed" if num_failed else 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
