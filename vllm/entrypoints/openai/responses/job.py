"""Run a response in the background: it continues without a client, and can be streamed later.

Single-threaded: belongs to one event loop.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from vllm.entrypoints.http.sse import event as encode
from vllm.entrypoints.openai.responses.output import Event
from vllm.logger import init_logger

logger = init_logger(__name__)


class BackgroundJob:
    """Reads a stream of events and stores them for later readers.

    Args:
        events: lists of events; closing it aborts the request in the engine. Errors are also
            events.
        is_log_kept: store the events, so that they can be streamed.
        on_end: called once, after the last event or a cancellation.
    """

    def __init__(
        self,
        events: AsyncGenerator[Sequence[Event], None],
        *,
        is_log_kept: bool,
        on_end: Callable[[], None],
    ) -> None:
        self.is_log_kept = is_log_kept
        self.num_bytes = 0
        self._log: list[bytes] = []
        self._news = asyncio.Event()
        self._on_end = on_end
        self._task = asyncio.create_task(self._drain(events))
        # As a callback and not inside the task: a task that is cancelled at once never starts.
        self._task.add_done_callback(self._end)

    @property
    def is_running(self) -> bool:
        """Whether more events may follow."""
        return not self._task.done()

    async def cancel(self) -> None:
        """Cancel the job. Returns after the request has left the engine."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def follow(self, start: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events from index `start` on: stored events and new ones."""
        index = start
        while True:
            news = self._news  # read before the log, so that events that arrive later set it
            while index < len(self._log):
                yield self._log[index]
                index += 1
            if not self.is_running:
                return
            await news.wait()

    async def _drain(self, events: AsyncGenerator[Sequence[Event], None]) -> None:
        async with aclosing(events):
            async for few in events:
                if not self.is_log_kept:
                    continue
                for event in few:
                    self._log.append(encode(event, event["type"]))
                    self.num_bytes += len(self._log[-1])
                self._tell()

    def _end(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a background response failed", exc_info=error)
        self._on_end()
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
