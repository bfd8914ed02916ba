"""Queue the outputs of a request between the engine and its consumer."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

_Output = TypeVar("_Output")


class RequestStream(Generic[_Output]):
    """Queues the outputs of one request, from the engine to the one coroutine that consumes them.

    The queue needs no limit: a request has no more outputs than tokens.

    Attributes:
        is_finished: the last output, or an error, was added.
    """

    __slots__ = ("_error", "_outputs", "_waiter", "is_finished")

    def __init__(self) -> None:
        self.is_finished = False
        self._outputs: deque[_Output] = deque()
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: _Output, *, is_last: bool) -> None:
        """Add an output."""
        self._outputs.append(output)
        self.is_finished = is_last
        self._wake()

    def fail(self, error: BaseException) -> None:
        """End the stream with an error, which the consumer gets after the queued outputs."""
        self._error = error
        self.is_finished = True
        self._wake()

    async def get(self) -> _Output:
        """Wait for the next output and return it.

        Raises:
            The error with which the request has failed.
        """
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._outputs.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
