"""Test `vllm serve` with several ranks: one rank is killed under load, and all ranks are started
again.
"""

import asyncio

import psutil
import pytest

from tests.e2e.server import Server, start_server, wait_until
from tests.e2e.test_server_faults import LONG, SHORT, answers_around

pytestmark = pytest.mark.e2e

LOAD = [{**LONG, "stream": index % 2 == 1} for index in range(8)]


def ranks(server: Server) -> list[psutil.Process]:
    """Return the ranks that run in separate processes."""
    return [each for each in server.children() if each.name().startswith("vllm-rank-")]


def kill_a_rank(server: Server) -> tuple[list[tuple[int, str]], list[psutil.Process]]:
    """Kill a rank while requests run. Return the answers, and the processes of the ranks from
    before the kill.
    """
    before = ranks(server)
    return asyncio.run(answers_around(server, LOAD, before[0].kill)), before


def is_lost(answer: tuple[int, str]) -> bool:
    """Return whether a request failed because of the killed rank; a stream reports it in its last
    event.
    """
    status, text = answer
    assert (status in (200, 500)) and ("has ended: killed by signal 9" in text) >= (status == 500)
    assert "RankError" not in text  # the message is a sentence, without the name of a class
    return "has ended: killed by signal 9" in text


@pytest.mark.exhaustive
@pytest.mark.parametrize("flags", [("-pp", "2"), ("-tp", "2")], ids=" ".join)
def test_a_group_of_ranks_is_started_again_when_one_is_killed(flags):
    with start_server(*flags, "--restart-engine", "1") as server:
        expected = server.request("POST", "/v1/completions", SHORT)[2]
        answers, before = kill_a_rank(server)
        assert all(map(is_lost, answers))
        # The request waits until the engine has started again.
        status, _, body = server.request("POST", "/v1/completions", SHORT)
        assert status == 200 and text_of(body) == text_of(expected)
        after = ranks(server)
        assert len(after) == len(before) == 1 and after != before
        assert not before[0].is_running()
        assert server.metric("vllm:engine_restarts_total") == 1


def text_of(body: bytes) -> bytes:
    return body.split(b'"text":')[1].split(b'"logprobs"')[0]


@pytest.mark.exhaustive
def test_the_other_replica_of_several_ranks_serves_on():
    flags = ("-tp", "2", "-dp", "2", "--restart-engine", "1")
    with start_server(*flags, variables={"VLLM_SERVER_DEV_MODE": "1"}) as server:
        answers, before = kill_a_rank(server)
        assert len(before) == 2
        assert len([answer for answer in answers if is_lost(answer)]) == len(LOAD) / 2
        assert server.request("POST", "/v1/completions", SHORT)[0] == 200
        wait_until(lambda: server.replica_states() == ["ready", "ready"])
        after = ranks(server)
        assert len(after) == 2 and len(set(after) & set(before)) == 1
        answers = asyncio.run(answers_around(server, [SHORT] * 8, lambda: None))
        assert [status for status, _ in answers] == [200] * 8
