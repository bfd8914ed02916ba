"""Test media that several requests wait for, and the cache of read media."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from tests.reach import unfinished_reads_of
from vllm.engine.input import media_reader
from vllm.engine.input.media_input import read_media
from vllm.engine.input.media_reader import MediaReader, PixelCache
from vllm.errors import RequestError
from vllm.multimodal.interface.family import EncoderInput
from vllm.multimodal.interface.source import MediaSource

HANGS_S = 60
"""A test that has not ended then would never end."""


def encoded(num_bytes: int) -> EncoderInput:
    return EncoderInput({"pixels": np.zeros(num_bytes, np.uint8)}, (1,))


def image(name: str) -> MediaSource:
    return MediaSource(modality="image", where=name, data=name.encode())


class Workers:
    """Reads items when the test says so."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.cancelled: list[str] = []
        self.may_end = asyncio.Event()
        self.is_closed = False

    def start_in_background(self) -> None:
        """Do nothing: there are no processes."""

    def close(self) -> None:
        self.is_closed = True

    async def run(self, source: MediaSource) -> EncoderInput:
        self.started.append(source.where)
        if "damaged" in source.where:
            raise RequestError(f"{source.where}: it is damaged")
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.cancelled.append(source.where)
            raise
        return encoded(10)


class Prompts:
    """The processor of an engine whose prompts are lists of images."""

    def __init__(self) -> None:
        self.media = self
        self.uses_files = False

    def sources(self, prompt):
        return prompt["multi_modal_data"]["image"]


def prompt(*names: str):
    return {"prompt": "", "multi_modal_data": {"image": [image(name) for name in names]}}


@pytest.fixture
def run(monkeypatch):
    """Run a test in an event loop, with a reader and its workers."""

    def run(test, cache_bytes=100):
        async def main():
            reader, workers, before = MediaReader(Prompts), Workers(), asyncio.all_tasks()
            monkeypatch.setattr(media_reader, "MediaWorkers", lambda *_, **__: workers)
            reader.prepare(SimpleNamespace(family="any", cache_bytes=cache_bytes, job_arguments={}))
            try:
                await test(reader, workers)
            finally:
                reader.shutdown()
            assert workers.is_closed and not unfinished_reads_of(reader)
            assert asyncio.all_tasks() == before, "no task is left"

        asyncio.run(asyncio.wait_for(main(), HANGS_S))

    return run


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0)


def begin(reader, *names):
    return asyncio.create_task(reader.read(prompt(*names)))


@pytest.mark.parametrize("cache_bytes", [0, 100])
def test_an_item_of_several_requests_is_read_once(run, cache_bytes):
    async def test(reader, workers):
        readers = [begin(reader, "a", "a"), begin(reader, "a", "b")]
        await until(lambda: sorted(workers.started) == ["a", "b"])
        workers.may_end.set()
        found = [read_media(each) for each in await asyncio.gather(*readers)]
        assert [len(items) for items in found] == [2, 2]
        await reader.read(prompt("a"))
        assert workers.started.count("a") == (1 if cache_bytes else 2)

    run(test, cache_bytes)


def test_an_item_that_nobody_waits_for_is_not_read(run):
    async def test(reader, workers):
        first, second = begin(reader, "a"), begin(reader, "a", "b")
        await until(lambda: sorted(workers.started) == ["a", "b"])
        second.cancel()
        await asyncio.wait([second])
        await until(lambda: workers.cancelled == ["b"])
        workers.may_end.set()
        assert await first
        workers.may_end.clear()
        last = begin(reader, "c")
        await until(lambda: "c" in workers.started)
        last.cancel()
        await asyncio.wait([last])
        again = begin(reader, "c")  # it does not get the task that was cancelled
        await until(lambda: workers.started.count("c") == 2)
        workers.may_end.set()
        assert await again

    run(test)


def test_a_damaged_item_ends_the_reading_of_the_others_and_is_not_kept(run):
    async def test(reader, workers):
        for _ in range(2):
            with pytest.raises(RequestError, match="it is damaged"):
                await reader.read(prompt("slow", "damaged"))
        await until(lambda: workers.cancelled == ["slow", "slow"])
        assert workers.started == ["slow", "damaged"] * 2

    run(test)


def test_the_cache_is_limited_in_bytes_and_keeps_what_was_used_last():
    cache = PixelCache(30)
    for name in "abc":
        cache.keep(name, encoded(10))
    assert cache.find("a") is not None
    cache.keep("d", encoded(10))
    assert [name for name in "abcd" if cache.find(name) is not None] == ["a", "c", "d"]
    cache.keep("large", encoded(31))
    cache.keep("most", encoded(30))
    assert [name for name in ("a", "large", "most") if cache.find(name)] == ["most"]
    assert (cache.num_queries, cache.num_hits) == (8, 5)
    cache.clear()
    assert cache.find("most") is None
    nothing = PixelCache(0)
    nothing.keep("a", encoded(1))
    assert nothing.find("a") is None
