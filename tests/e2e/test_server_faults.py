"""Test which faults a live server survives, which stop it, and that it leaves nothing behind."""

import asyncio
import json
import signal
import time

import psutil
import pytest

from tests.e2e.server import start_server

pytestmark = pytest.mark.e2e

LONG = {"prompt": "import", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": "import", "max_tokens": 4, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(chat_server):
    return chat_server


async def send(server, body, *, num_events=None, on_status=None):
    """Return (status, body) of a completion. With `num_events`, disconnect after this many events
    of a stream.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + data)
        status = int((await reader.readline()).split()[1])
        if on_status is not None:
            on_status()
        if num_events is None:
            return status, (await reader.read()).decode()
        text = b""
        while text.count(b"data: ") < num_events:
            text += await reader.readline()
        return status, text.decode()
    finally:
        writer.close()


async def send_all(server, bodies, **options):
    tasks = [asyncio.ensure_future(send(server, body, **options)) for body in bodies]
    return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 300)


def finished_requests(server):
    return server.metric("vllm:request_success_total")


async def until_received(server, num_finished_before, number):
    """Wait until this many more requests run, wait or have finished."""

    def num_received():
        gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        ended = finished_requests(server) - num_finished_before
        return ended + sum(server.metric(name) for name in gauges)

    end = time.monotonic() + 300
    while (found := await asyncio.to_thread(num_received)) < number:
        assert time.monotonic() < end, f"{found} of {number}:\n{server.log_text()}"
        await asyncio.sleep(0.02)


def test_clients_that_leave_in_the_middle_free_their_blocks(server):
    before = finished_requests(server)
    bodies = [{**LONG, "stream": True, "seed": index} for index in range(100)]
    answers = asyncio.run(send_all(server, bodies, num_events=2))
    assert [status for status, _ in answers] == [200] * 100
    server.wait_until_idle()
    assert finished_requests(server) == before + 100
    assert server.request("POST", "/v1/completions", SHORT)[0] == 200


def test_clients_that_leave_while_they_wait_free_their_places(server):
    before = finished_requests(server)

    async def leave():
        tasks = [asyncio.ensure_future(send(server, LONG)) for _ in range(300)]
        await until_received(server, before, len(tasks))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(leave())
    server.wait_until_idle()
    assert server.request("POST", "/v1/completions", SHORT)[0] == 200


def test_a_thousand_connections_at_once_are_all_answered(server):
    before = finished_requests(server), server.metric("vllm:generation_tokens_total")
    answers = asyncio.run(send_all(server, [SHORT] * 1000))
    assert [status for status, _ in answers] == [200] * 1000
    server.wait_until_idle()
    after = finished_requests(server), server.metric("vllm:generation_tokens_total")
    assert (after[0] - before[0], after[1] - before[1]) == (1000, 4000)


async def answers_around(server, bodies, act):
    """Return the answers to requests during which `act` is called.

    It is called when the engine has all requests and streams have begun. The status of a stream is
    sent with its first token, so a failure before it is visible in the status.
    """
    before = finished_requests(server)
    streams = [asyncio.Event() if body.get("stream") else None for body in bodies]
    tasks = [
        asyncio.ensure_future(send(server, body, on_status=begun and begun.set))
        for body, begun in zip(bodies, streams, strict=True)
    ]
    await until_received(server, before, len(bodies))
    for begun in streams:
        if begun is not None:
            await asyncio.wait_for(begun.wait(), 300)
    act()
    return await asyncio.wait_for(asyncio.gather(*tasks), 300)


def test_an_engine_that_is_killed_is_started_again_as_often_as_allowed_and_every_request_is_told():
    """Drafts are in flight, because the outputs soon repeat themselves."""
    drafts = '{"method": "ngram", "adaptive": false}'
    with start_server("--restart-engine", "1", "--speculative-config", drafts) as server:
        bodies = [LONG] * 8 + [{**LONG, "stream": True}] * 8
        first = server.engine_process()

        def kill():
            while not server.metric("vllm:spec_decode_num_drafts_total"):
                pass
            first.kill()

        answers = asyncio.run(answers_around(server, bodies, kill))
        for status, text in answers[:8]:
            assert status == 500 and "signal 9" in text
        for status, text in answers[8:]:
            assert status == 200 and "signal 9" in text and "[DONE]" in text
        assert server.request("GET", "/livez")[0] == 200
        # This request waits until the engine is back.
        waited = server.request("POST", "/v1/completions", SHORT)
        assert waited[0] == 200
        assert server.metric("vllm:engine_restarts_total") == 1
        second = server.engine_process()
        assert second.pid != first.pid
        second.kill()
        assert server.wait_for_exit() == 1
        errors = [line for line in server.log_text().splitlines() if line.startswith("error: ")]
        how = "the engine process has ended (killed by signal 9, probably out of memory: "
        assert len(errors) == 1 and errors[0].startswith(f"error: {how}")


# Exhaustive: tests/engine/test_core_process.py tests that a core ends with its parent.
@pytest.mark.exhaustive
def test_the_engine_ends_with_a_server_that_is_killed():
    with start_server() as server:
        core = server.engine_process()
        server.send_signal(signal.SIGKILL)
        server.wait_for_exit()
        gone, _ = psutil.wait_procs([core], timeout=60)
        assert gone == [core]
        server.remove_scratch()
