"""Freed memory goes back to the system, once for all who ask at about the same time."""

import asyncio

from vllm.utils import memory_trim
from vllm.utils.memory_trim import MemoryTrim, give_back_memory


def test_giving_back_works_or_says_that_it_does_not():
    assert give_back_memory() in (True, False)


def test_those_who_ask_together_are_served_together(monkeypatch):
    calls, done = [], asyncio.Event()

    async def main():
        loop = asyncio.get_running_loop()

        def give_back():
            calls.append(1)
            loop.call_soon_threadsafe(done.set)

        monkeypatch.setattr(memory_trim, "give_back_memory", give_back)
        monkeypatch.setattr(memory_trim, "DELAY_S", 0.001)
        trim = MemoryTrim()
        for count in (1, 2):
            trim.soon()
            trim.soon()
            await done.wait()
            done.clear()
            assert len(calls) == count

    asyncio.run(main())
