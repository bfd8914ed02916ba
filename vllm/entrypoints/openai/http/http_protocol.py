"""HTTP on a connection, with bounds that the parser itself does not have."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 2**10
"""Request line and headers of one request."""
HEAD_TIMEOUT_S = 30.0
"""From the connection, or the first byte of a request, to the end of its headers."""

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class BoundedHttpProtocol(HttpToolsProtocol):
    """Cuts connections whose request line and headers are too long, or take too long."""

    _head_bytes = 0
    _is_in_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a first request."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes in, in pieces: only what belongs to a head counts as one."""
        if self._is_in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        is_too_large = self._is_in_head and self._head_bytes > MAX_HEAD_BYTES
        if is_too_large and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        """The parser has seen the first byte of a request."""
        super().on_message_begin()
        if not self._is_in_head:
            self._is_in_head = True
            self._head_bytes = 0
        if self._head_timer is None:
            self._start_timer()

    def on_headers_complete(self) -> None:
        """The parser has seen the end of the headers."""
        self._is_in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()
