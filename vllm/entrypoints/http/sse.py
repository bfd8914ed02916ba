"""Send responses that stop when the client disconnects: server-sent events, and awaited results.

Closing the source of a stream aborts its request, so a source is always closed here and at once,
never by the garbage collector. Independent of engine and API.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm.entrypoints.http.scoped_cancel import ScopedCancel
from vllm.logger import init_logger

logger = init_logger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
"""The event that ends a stream of the OpenAI API."""

_encode = msgspec.json.Encoder().encode


class ClientDisconnected(Exception):
    """The client has disconnected before its response was ready."""


def event(data: Any, name: str | None = None) -> bytes:
    """Return one server-sent event.

    Args:
        data: data, which msgspec must be able to encode as JSON.
        name: type of the event; None: no type, as in the OpenAI chat API.
    """
    if name is None:
        return b"data: " + _encode(data) + b"\n\n"
    return b"event: " + name.encode() + b"\ndata: " + _encode(data) + b"\n\n"


async def typed_events(
    events: AsyncGenerator[Sequence[dict[str, Any]], None],
) -> AsyncGenerator[bytes, None]:
    """Yield encoded events whose field `type` is also the type of the event."""
    async with aclosing(events):
        async for few in events:
            yield b"".join(event(each, each["type"]) for each in few)


async def run_until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; cancel it if the client disconnects.

    The body of the request must have been read.

    Raises:
        ClientDisconnected: the client has disconnected; the handlers of `errors` handle it.
        Exception: the error that `work` raises.
    """
    return await _until_disconnect(request.receive, work)


class EventStream(Response):
    """A response of server-sent events.

    The headers are sent with the first event, so that an error before it still gets its own
    response: an error that `events` raises before the first event is raised here, for the exception
    handlers.

    Args:
        events: encoded events as bytes; an item may contain several events or a part of one. It is
            always closed, even if the client disconnects before the first event.
        headers: additional headers.
        end: events after the last item.
        on_error: returns the events for an error after the first item. None: `events` should not
            raise such an error, because the connection would be cut.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str] | None = None,
        *,
        end: bytes = b"",
        on_error: Callable[[Exception], bytes] | None = None,
    ) -> None:
        self.events = events
        self._end, self._on_error = end, on_error
        self.status_code = 200
        self.background = None
        # Headers that stop proxies such as nginx from buffering events.
        own = {"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})}
        self.init_headers(own)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _until_disconnect(receive, self._send_all(send))
        except ClientDisconnected:
            return

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self.events):
            is_started, last = False, self._end
            while True:
                try:
                    data = await anext(self.events)
                except StopAsyncIteration:
                    break
                except Exception as error:  # last resort: the client gets it as an event
                    if not is_started or self._on_error is None:
                        raise
                    last = self._on_error(error)
                    break
                if not is_started:
                    is_started = True
                    await self._send_headers(send)
                await send({"type": "http.response.body", "body": data, "more_body": True})
            if not is_started:
                await self._send_headers(send)
            if last:
                await send({"type": "http.response.body", "body": last, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_headers(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )


async def _until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    cancellation = ScopedCancel()
    watcher = asyncio.ensure_future(_cancel_at_disconnect(receive, cancellation))
    try:
        return await work
    except (asyncio.CancelledError, Exception):
        if cancellation.is_the_only_one():
            raise ClientDisconnected from None
        raise
    finally:
        watcher.cancel()


async def _cancel_at_disconnect(receive: Receive, cancellation: ScopedCancel) -> None:
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except Exception:  # whether the client is still connected is unknown: end the request
        logger.debug("the connection of a request failed", exc_info=True)
    cancellation.request()
