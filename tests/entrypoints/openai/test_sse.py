"""Test that streams end when their client leaves, and free everything."""

import asyncio

import pytest
from fastapi import Request

from vllm.entrypoints.http.sse import ClientDisconnected, EventStream, event, run_until_disconnect
from vllm.entrypoints.openai.shared.merge import merge


class Connection:
    """The receiving and sending side of one request; the client leaves after `stay` messages."""

    def __init__(self, stay: int = 10**5) -> None:
        self.sent = []
        self._stay = stay
        self._left = asyncio.Event()
        if not stay:
            self._left.set()

    async def receive(self):
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message) -> None:
        self.sent.append(message)
        if len(self.sent) >= self._stay:
            self._left.set()

    @property
    def body(self) -> bytes:
        return b"".join(m["body"] for m in self.sent if m["type"] == "http.response.body")


class Source:
    """Endless events, or an error instead of one of them; records whether it was closed."""

    def __init__(self, fail_at: int | None = None, count: int = 10**5) -> None:
        self.is_closed = False
        self._fail_at = fail_at
        self._count = count

    async def events(self):
        try:
            for i in range(self._count):
                await asyncio.sleep(0)
                if i == self._fail_at:
                    raise ValueError("no")
                yield b"%d;" % i
        finally:
            self.is_closed = True


def serve(stream, connection) -> None:
    async def run():
        others = asyncio.all_tasks()
        try:
            await stream({"type": "http"}, connection.receive, connection.send)
        finally:
            await asyncio.sleep(0)  # cancelled tasks end in this turn of the event loop
            assert asyncio.all_tasks() == others, "tasks were left behind"

    asyncio.run(run())


def test_a_stream_is_sent_item_by_item_and_ended():
    source, connection = Source(count=3), Connection()
    serve(EventStream(source.events(), {"x-a": "b"}), connection)
    start, *bodies = connection.sent
    assert start["status"] == 200
    assert (b"x-a", b"b") in start["headers"]
    assert any(v.startswith(b"text/event-stream") for _, v in start["headers"])
    assert [b["body"] for b in bodies] == [b"0;", b"1;", b"2;", b""]
    assert [b["more_body"] for b in bodies] == [True, True, True, False]


def test_an_error_before_the_first_item_is_raised_and_nothing_was_sent():
    source, connection = Source(fail_at=0), Connection()
    with pytest.raises(ValueError, match="no"):
        serve(EventStream(source.events()), connection)
    assert not connection.sent
    assert source.is_closed


@pytest.mark.parametrize("stay", [0, 1, 2, 5])
def test_a_client_that_leaves_closes_the_source(stay):
    source, connection = Source(), Connection(stay)
    serve(EventStream(source.events()), connection)
    assert source.is_closed or stay == 0  # if the stream never began, there is nothing to close
    assert len(connection.sent) <= stay + 4


def test_an_awaited_answer_is_cancelled_when_the_client_leaves():
    cancelled = []

    async def work():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def run(connection, coroutine):
        request = Request({"type": "http"}, connection.receive)
        return await run_until_disconnect(request, coroutine)

    async def answer():
        return 7

    with pytest.raises(ClientDisconnected):
        asyncio.run(run(Connection(stay=0), work()))
    assert cancelled
    assert asyncio.run(run(Connection(), answer())) == 7


def test_a_task_goes_on_after_its_client_has_left_and_ends_when_others_cancel_it():
    async def leave_then_go_on():
        request = Request({"type": "http"}, Connection(stay=0).receive)
        with pytest.raises(ClientDisconnected):
            await run_until_disconnect(request, asyncio.sleep(60))
        await asyncio.sleep(0.001)
        return 7

    async def run():
        assert await asyncio.create_task(leave_then_go_on()) == 7
        request = Request({"type": "http"}, Connection().receive)
        task = asyncio.create_task(run_until_disconnect(request, asyncio.sleep(60)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_events_have_the_form_of_the_standard():
    assert event({"a": "é\n"}) == 'data: {"a":"é\\n"}\n\n'.encode()
    assert event({}, "done") == b"event: done\ndata: {}\n\n"


@pytest.mark.parametrize("num_sources", [1, 3])
def test_merged_sources_keep_their_order_and_are_closed(num_sources):
    async def run(count):
        sources = [Source(count=count) for _ in range(num_sources)]
        merged, found = merge([s.events() for s in sources]), []
        async for index, item in merged:
            found.append((index, item))
            if len(found) == 3 * num_sources:
                break
        await merged.aclose()
        assert all(s.is_closed for s in sources)
        return found

    for count in (3, 10**5):
        found = asyncio.run(run(count))
        for index in {i for i, _ in found}:
            mine = [item for i, item in found if i == index]
            assert mine == [b"%d;" % i for i in range(len(mine))]
    assert len(asyncio.run(run(3))) == 3 * num_sources


def test_the_error_of_one_source_closes_the_others():
    good, bad = Source(), Source(fail_at=3)

    async def run():
        async for _ in merge([good.events(), bad.events()]):
            pass

    with pytest.raises(ValueError, match="no"):
        asyncio.run(run())
    assert good.is_closed
    assert bad.is_closed


def test_no_more_sources_run_at_a_time_than_may():
    running, most = set(), []

    async def source(name):
        running.add(name)
        most.append(len(running))
        for step in range(30):
            await asyncio.sleep(0)
            yield step
        running.discard(name)

    async def run():
        return [index async for index, _ in merge([source(i) for i in range(20)], 4)]

    assert sorted(asyncio.run(run())) == sorted([*range(20)] * 30)
    assert max(most) == 4
