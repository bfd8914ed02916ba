"""Merge several asynchronous generators into one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from vllm.utils.futures import end_tasks

T = TypeVar("T")

_MAX_AHEAD = 64
"""Maximum number of items that wait for the consumer, over all sources."""


async def merge(
    sources: Sequence[AsyncGenerator[T, None]], max_running: int | None = None
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (index of the source, item) in the order of arrival.

    Every source is closed when this is closed, when a source raises, and at the end; the error of a
    source is raised. One source is started per iteration of the event loop, so that other tasks can
    run in between.

    Args:
        sources: generators to merge.
        max_running: number of sources that run at a time, in order; None: no limit.
    """
    if len(sources) == 1:  # the usual case needs no task and no queue
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T]] = asyncio.Queue(_MAX_AHEAD)
    pumps: list[asyncio.Future[None]] = []
    everything: asyncio.Future[list[None]] | None = None
    turns = asyncio.Semaphore(max_running or len(sources))
    try:
        for index, source in enumerate(sources):
            pumps.append(asyncio.ensure_future(_pump(index, source, queue, turns)))
            await asyncio.sleep(0)
        everything = asyncio.gather(*pumps)
        while not everything.done():
            get = asyncio.ensure_future(queue.get())
            try:
                await asyncio.wait((get, everything), return_when=asyncio.FIRST_COMPLETED)
            finally:
                has_item = get.done()
                get.cancel()
            if has_item:
                yield get.result()
        everything.result()  # raises the error of a source
        while not queue.empty():
            yield queue.get_nowait()
    finally:
        await end_tasks(pumps)
        if everything is not None:
            # The error of a source was already raised above, unless the consumer stopped early.
            await asyncio.gather(everything, return_exceptions=True)


async def _pump(
    index: int,
    source: AsyncGenerator[T, None],
    queue: "asyncio.Queue[tuple[int, T]]",
    turns: asyncio.Semaphore,
) -> None:
    async with turns, aclosing(source):
        async for item in source:
            await queue.put((index, item))
