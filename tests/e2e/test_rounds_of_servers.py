"""A server of two ranks is started and ended many times, each time in another way, and nothing of
it is left: no process, no file, no shared memory, no semaphore."""

import asyncio
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.server import Server, start_server, wait_until
from tests.e2e.test_restart_parallel import ranks
from tests.e2e.test_server_faults import LONG, SHORT, answers_around, send_all

pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]

FLAGS = ("-tp", "2", "--max-model-len", "512", "--kv-cache-memory-bytes", "64M")
TIMEOUT_S = 5
BODY = {**LONG, "max_tokens": 400}
LOAD = [{**BODY, "stream": index % 2 == 1} for index in range(6)]
MARK = "TEST_OF_ROUNDS"
"""A variable that all processes of a round inherit."""


def processes_of(mark: str) -> list[psutil.Process]:
    """All that have this mark, whoever their parent is."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        if environment.get(MARK) == mark:
            found.append(process)
    return found


def named_memory() -> set[str]:
    """Shared memory and semaphores with a name: of POSIX those that no process uses, of System V
    all."""
    used = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            used |= {line.split()[-1] for line in maps.read_text().splitlines() if "/dev/shm" in line}
        except OSError:
            continue
    files = {str(path) for path in Path("/dev/shm").rglob("*")} - used
    for kind in ("shm", "sem", "msg"):
        files |= {f"{kind} {line}" for line in Path(f"/proc/sysvipc/{kind}").read_text().split("\n")}
    return files


def under_load(act: Callable[[Server], None]) -> Callable[[Server], str]:
    """A way to end: `act` in the middle of a load. Every request is answered."""

    def end(server: Server) -> str:
        answers = asyncio.run(answers_around(server, LOAD, lambda: act(server)))
        assert len(answers) == len(LOAD)
        return " ".join(text for _, text in answers)

    end.__name__ = act.__name__
    return end


def stop_cleanly(server: Server) -> str:
    """After clients that have left, whose blocks are free again."""
    asyncio.run(send_all(server, [{**BODY, "stream": True}] * 4, num_events=2))
    server.wait_until_idle()
    server.send_signal(random.choice([signal.SIGTERM, signal.SIGINT]))
    assert server.wait_for_exit() == 0
    return ""


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
def stop_a_rank(server: Server) -> None:
    ranks(server)[0].suspend()


def kill_the_front_end(server: Server) -> str:
    async def kill() -> None:
        begun = asyncio.Event()
        kept = asyncio.ensure_future(
            send_all(server, [{**BODY, "stream": True}] * 2, on_status=begun.set)
        )
        await begun.wait()
        server.send_signal(signal.SIGKILL)
        await kept

    asyncio.run(kill())
    return ""


def kill_a_front_end_whose_engine_is_stopped(server: Server) -> str:
    server.children()
    server.engine_process().suspend()
    server.send_signal(signal.SIGKILL)
    return ""


def kill_a_front_end_whose_rank_is_stopped(server: Server) -> str:
    ranks(server)[0].suspend()
    server.send_signal(signal.SIGKILL)
    return ""


def kill_all_in_any_order(server: Server) -> str:
    found = [psutil.Process(server.process.pid), *server.children()]
    random.shuffle(found)
    for process in found:
        process.kill()
    return ""


def restart_after_a_killed_rank(server: Server) -> str:
    """The group comes back, serves, and has no block in use."""
    return ""


AWAITED = [
    stop_cleanly,
    kill_a_rank,
    kill_the_engine,
    kill_the_front_end,
    stop_a_rank,
    stop_under_load,
    kill_a_front_end_whose_engine_is_stopped,
    kill_a_front_end_whose_rank_is_stopped,
    kill_all_in_any_order,
]
STARTING = [
    ("killed in its start", signal.SIGKILL),
    ("stopped in its start", signal.SIGTERM),
]


def one_round(number: int) -> None:
    mark = f"{os.getpid()}-{number}"
    variables = {MARK: mark}
    flags = (*FLAGS, "--distributed-timeout-s", str(TIMEOUT_S))
    before = named_memory()
    way = number % (len(AWAITED) + 1)
    with start_server(*flags, variables=variables, is_awaited=way < len(AWAITED)) as server:
        if way < len(AWAITED):
            AWAITED[way](server)
        else:
            time.sleep(random.uniform(0.2, 7))
            server.send_signal(random.choice([signal.SIGKILL, signal.SIGTERM]))
        code = server.wait_for_exit()
        wait_until(lambda: not processes_of(mark))
        left = [str(path) for path in server._scratch.rglob("*")]
        assert not left, left
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", server.port))
    assert named_memory() <= before, named_memory() - before
    return code
