"""Limit request bodies: size, time to arrive, and content type. Compressed bodies are decompressed.

The whole body is read here. So no route has to wait for a client, and a body that is too large is
refused before it is in memory.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple

from fastapi import APIRouter
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm.entrypoints.http.asgi import get_header, refuse, replay, route_path
from vllm.entrypoints.http.errors import ErrorInfo
from vllm.entrypoints.http.scoped_cancel import ScopedCancel
from vllm.entrypoints.middleware.decompression import (
    ENCODINGS,
    DecompressionError,
    OutputTooLargeError,
    decompress,
)
from vllm.utils.process.process_memory import MemoryTrim

_HUGE_BODY_BYTES = 2**20
"""A body of this size is joined outside the event loop, and memory is returned to the system after
its request."""
_LARGE_BODY_BYTES = 2**15
"""Compressed bodies of this size are unpacked outside the event loop."""
_ANY_TYPE_PREFIX = "/v1/audio/"
"""Routes that accept files, not JSON."""


class SizeLimit(NamedTuple):
    """The largest allowed body, in bytes."""

    max_bytes: int
    flag: str
    """Flag that sets the limit."""


class BodyLimits:
    """Reads the body of each request, and answers 413, 408 or 415 if it breaks a limit.

    Args:
        app: gets the requests with accepted bodies.
        max_bytes: returns the limit for the body of a request, by its path.
        timeout_s: seconds for the body to arrive.
        routers: routers of the server. `app` answers a request to an unknown path, whatever the
            type of the body.
    """

    def __init__(
        self,
        app: ASGIApp,
        limit_of: Callable[[str], SizeLimit],
        timeout_s: float,
        routers: Iterable[APIRouter],
    ) -> None:
        self.app = app
        self._routes = [route for router in routers for route in router.routes]
        self._limit_of = limit_of
        self._timeout_s = timeout_s
        self._memory = MemoryTrim()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit = self._limit_of(route_path(scope))
        refusal = self._check_headers(scope, limit)
        if refusal is not None:
            await refuse(scope, receive, send, refusal)
            return
        late = ScopedCancel()
        timer = asyncio.get_running_loop().call_later(self._timeout_s, late.request)
        try:
            body = await self._read(receive, limit.max_bytes)
        except _TooLarge:
            await refuse(scope, receive, send, _too_large(limit))
            return
        except asyncio.CancelledError:
            if not late.is_the_only_one():
                raise
            message = f"the body did not arrive within {self._timeout_s:g} s (--body-timeout)"
            info = ErrorInfo(408, message, headers=_CLOSE)
            await refuse(scope, receive, send, info)
            return
        finally:
            timer.cancel()
        encoding = _encoding_of(scope)
        if body and encoding:
            try:
                scope, body = await self._unpack(scope, body, encoding, limit.max_bytes)
            except OutputTooLargeError:
                await refuse(scope, receive, send, _too_large(limit))
                return
            except DecompressionError as error:
                info = ErrorInfo(400, f"the body is not valid {encoding} data: {error}")
                await refuse(scope, receive, send, info)
                return
        if body is not None:
            num_bytes = len(body)
            receive = replay({"type": "http.request", "body": body, "more_body": False}, receive)
            del body  # frees the body as soon as the route has read it
            try:
                await self.app(scope, receive, send)
            finally:
                if num_bytes >= _HUGE_BODY_BYTES:
                    self._memory.schedule()

    def _check_headers(self, scope: Scope, limit: SizeLimit) -> ErrorInfo | None:
        length = get_header(scope, b"content-length")
        if length is not None and length.isascii() and length.isdecimal():
            if int(length[:20]) > limit.max_bytes:
                return _too_large(limit)
            if int(length[:20]) == 0:
                return None
        elif get_header(scope, b"transfer-encoding") is None:
            return None  # the request has no body
        encoding = _encoding_of(scope)
        if encoding and encoding not in ENCODINGS:
            message = f"Content-Encoding must be one of {', '.join(ENCODINGS)}, got "
            message += repr(encoding[:100])
            return ErrorInfo(415, message, headers={"Accept-Encoding": ", ".join(ENCODINGS)})
        if scope["method"] != "POST" or route_path(scope).startswith(_ANY_TYPE_PREFIX):
            return None
        given = (get_header(scope, b"content-type") or "").partition(";")[0].strip().lower()
        if given == "application/json" or given.endswith("+json"):
            return None
        if all(route.matches(scope)[0] is Match.NONE for route in self._routes):
            return None
        got = repr(given[:100]) if given else "no Content-Type"
        message = f"Content-Type must be application/json, got {got}: send this header"
        return ErrorInfo(415, message)

    async def _read(self, receive: Receive, max_bytes: int) -> bytes | None:
        """Read the body; None if the client disconnects before its end."""
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise _TooLarge
            parts.append(part)
            if not message.get("more_body", False):
                if num_bytes < _HUGE_BODY_BYTES:
                    return b"".join(parts)
                return await asyncio.to_thread(b"".join, parts)

    async def _unpack(
        self, scope: Scope, body: bytes, encoding: str, max_bytes: int
    ) -> tuple[Scope, bytes]:
        """Decompress a body. Returns it with the headers of an uncompressed request.

        Raises:
            DecompressionError: the data is damaged or incomplete.
            OutputTooLargeError: the result is larger than `max_bytes`.
        """
        if len(body) < _LARGE_BODY_BYTES:
            body = decompress(body, encoding, max_bytes)
        else:
            body = await asyncio.to_thread(decompress, body, encoding, max_bytes)
        old = (b"content-encoding", b"content-length", b"transfer-encoding")
        headers = [pair for pair in scope["headers"] if pair[0] not in old]
        headers.append((b"content-length", str(len(body)).encode()))
        return {**scope, "headers": headers}, body


def _too_large(limit: SizeLimit) -> ErrorInfo:
    message = (
        f"the body is larger than {limit.max_bytes} bytes ({limit.flag}): send fewer or shorter "
        f"inputs"
    )
    return ErrorInfo(413, message, headers=_CLOSE)


def _encoding_of(scope: Scope) -> str:
    """Return the encoding of a compressed body; empty if it is not compressed."""
    given = (get_header(scope, b"content-encoding") or "").strip().lower()
    return "" if given == "identity" else given.removeprefix("x-")


# Close the connection: the unread rest of the body must not be parsed as a request.
_CLOSE = {"Connection": "close"}


class _TooLarge(Exception):
    """The body is larger than the limit."""
