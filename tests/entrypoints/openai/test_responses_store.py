"""Test stored responses: limits, age and owners; and jobs that create a response in the
background.
"""

import asyncio
import json
import random

import pytest

from vllm.entrypoints.openai.responses.job import BackgroundJob
from vllm.entrypoints.openai.responses.store import ResponseStore, StoredResponse
from vllm.errors import CapacityError, NotFoundError


class FakeJob:
    num_bytes = 0
    is_running = True


def make_entry(name, *, text="", owner=b"", job=None):
    output = [{"type": "message", "text": text}]
    return StoredResponse({"id": name, "output": output}, [], [], owner, job)


def ids(store, names, owner=b""):
    found = []
    for name in names:
        try:
            found.append(store.get(name, owner).response["id"])
        except NotFoundError:
            continue
    return found


def test_what_was_used_longest_ago_goes_first():
    store = ResponseStore(max_entries=2)
    store.add(make_entry("a"))
    store.add(make_entry("b"))
    store.get("a", b"")
    store.add(make_entry("c"))
    assert ids(store, "abc") == ["a", "c"]


def test_a_response_is_only_there_for_its_owner_and_until_it_is_deleted():
    store = ResponseStore()
    entry = make_entry("a", owner=b"me")
    store.add(entry)
    assert ids(store, "a", b"you") == []
    assert ids(store, "a", b"me") == ["a"]
    store.delete(entry)
    assert ids(store, "a", b"me") == []
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_response_is_kept_for_its_time_after_the_last_use():
    now = 0.0
    store = ResponseStore(ttl_s=10, clock=lambda: now)
    store.add(make_entry("a"))
    now = 8.0
    assert ids(store, "a") == ["a"]
    now = 17.0
    assert ids(store, "a") == ["a"]
    now = 27.0
    assert ids(store, "a") == []
    assert store.num_bytes == 0


@pytest.mark.parametrize("seed", range(20))
def test_the_store_never_holds_more_than_it_may(seed):
    rng = random.Random(seed)
    store = ResponseStore(max_entries=8, max_bytes=2000)
    added = []
    for i in range(100):
        added.append(make_entry(str(i), text="x" * rng.randrange(1500)))
        store.add(added[-1])
        assert len(store) <= 8
        assert store.num_bytes <= 2000
        kept = [entry.num_bytes for entry in added if ids(store, [entry.response["id"]])]
        assert store.num_bytes == sum(kept) and len(store) == len(kept)


def test_a_running_response_is_never_dropped_and_their_number_is_bounded():
    store = ResponseStore(max_entries=1, max_running=2)
    jobs = [FakeJob(), FakeJob()]
    entries = [make_entry(name, job=job) for name, job in zip("ab", jobs, strict=True)]
    for entry in entries:
        store.add(entry)
    store.add(make_entry("c"))
    assert ids(store, "abc") == ["a", "b", "c"]
    with pytest.raises(CapacityError, match="2 responses"):
        store.add(make_entry("d", job=FakeJob()))
    jobs[0].is_running = False
    store.finish(entries[0])
    assert ids(store, "abc") == ["a", "b"], "the finished one counts among the finished ones"


def test_running_responses_with_too_many_events_leave_no_room_for_others():
    store = ResponseStore(max_bytes=100)
    job = FakeJob()
    store.add(make_entry("a", job=job))
    store.check_room()
    job.num_bytes = 100
    with pytest.raises(CapacityError, match="100 bytes of events"):
        store.check_room()


def test_a_response_too_large_for_the_store_pushes_nothing_out():
    store = ResponseStore(max_bytes=200)
    store.add(make_entry("a"))
    store.add(make_entry("b", text="x" * 200))
    assert ids(store, "ab") == ["a"]


def test_a_deleted_response_does_not_come_back_when_it_ends():
    store = ResponseStore()
    entry = make_entry("a", job=FakeJob())
    store.add(entry)
    store.delete(entry)
    store.finish(entry)
    assert len(store) == 0


class Source:
    """Events that are sent when the test says so."""

    def __init__(self):
        self.queue = asyncio.Queue()
        self.is_closed = False

    async def events(self):
        try:
            while (names := await self.queue.get()) is not None:
                yield [{"type": name} for name in names]
        finally:
            self.is_closed = True


def test_followers_get_all_events_from_where_they_wish():
    async def run():
        source, ends = Source(), []
        job = BackgroundJob(source.events(), is_log_kept=True, on_end=lambda: ends.append(1))
        early = asyncio.create_task(collect(job.follow()))
        source.queue.put_nowait(["a", "b"])
        while not job.num_bytes:
            await asyncio.sleep(0)
        late = asyncio.create_task(collect(job.follow(1)))
        await asyncio.sleep(0)
        source.queue.put_nowait(["c"])
        source.queue.put_nowait(None)
        assert await early == ["a", "b", "c"]
        assert await late == ["b", "c"]
        assert await collect(job.follow(3)) == []
        assert (ends, job.is_running, job.num_bytes, source.is_closed) == ([1], False, 87, True)

    asyncio.run(run())


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_cancelled_job_closes_its_source_and_tells_its_followers(is_begun):
    async def run():
        source, ends = Source(), []
        job = BackgroundJob(source.events(), is_log_kept=True, on_end=lambda: ends.append(1))
        follower = asyncio.create_task(collect(job.follow()))
        if is_begun:
            source.queue.put_nowait(["a"])
            while not job.num_bytes:
                await asyncio.sleep(0)
        await job.cancel()
        assert ends == [1]
        assert source.is_closed == is_begun
        assert await asyncio.wait_for(follower, 120) == ["a"] * is_begun

    asyncio.run(run())


async def collect(events):
    """Return the types of the events in the order in which they are sent."""
    return [json.loads(event.split(b"data: ")[1])["type"] async for event in events]
