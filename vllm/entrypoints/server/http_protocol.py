"""Limit the size and the time of HTTP requests on a connection, which the parser does not do.

Every connection ends at some time: a timer runs whenever no response is being created.
"""

import asyncio
import json
import re
import sys
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from vllm.entrypoints.http.error_format import openai_error
from vllm.logger import init_logger

logger = init_logger(__name__)

MAX_HEAD_BYTES = 64 * 2**10
"""Maximum size of the request line and headers of one request."""
HEAD_TIMEOUT_S = 30.0
"""Seconds from the connection, or from the first byte of a request, to the end of its headers."""
BODY_TIMEOUT_S = 60.0
"""Default for the seconds from the end of the headers to the end of the body."""
LINGER_TIMEOUT_S = 15.0
"""Seconds to read the rest of a body after an early answer. Without it, the client would see a
reset of the connection and not the answer."""
MAX_LINGER_BYTES = 64 * 2**20
"""Maximum size of that rest."""

BODY_GRACE_S = 2.0
"""Seconds for the application to answer 408 itself, and for the client to read it."""
_UPGRADE_TO_HTTP2 = re.compile(rb"\r\nUpgrade(?=:[ \t]*h2c?[ \t]*\r\n)", re.IGNORECASE)
_IGNORED = b"\r\nIgnored"
"""Replaces the name of the header, with the same length."""
_TLS_HANDSHAKE = b"\x16\x03"
"""First bytes of a client that speaks HTTPS."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections whose requests are too long or too slow, in headers or body.

    If a connection must be closed while a body still arrives, it is closed after the body: closing
    it at once would reset the connection, and the client could lose the answer.

    Attributes:
        body_timeout_s: seconds for a body to arrive.
    """

    body_timeout_s = BODY_TIMEOUT_S

    _head_bytes = 0
    _is_in_head = True
    _is_in_body = False
    _is_lingering = False
    _body_left: int | None = None
    """Bytes of the body that have not arrived; None: not known."""
    _body_deadline = 0.0
    _num_discarded = 0
    _head_timer: asyncio.TimerHandle | None = None
    _body_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timer for the first request."""
        self._cycles: list[RequestResponseCycle] = []  # requests that are not answered yet
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer, and notify every request of the connection.

        The base class notifies only the newest one; the answer to an earlier one would be written
        to a closed connection.
        """
        self._stop_head_timer()
        self._stop_body_timer()
        super().connection_lost(exc)
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._cycles.clear()

    def data_received(self, data: bytes) -> None:
        """Parse the received bytes in pieces, so that only bytes of headers count for their
        limit.
        """
        if self._is_lingering:
            self._discard(data)
            return
        if self._is_in_head:
            self._head_bytes += len(data)
        if not self._is_in_body:
            data = _without_upgrade(data)
        if data.startswith(_TLS_HANDSHAKE) and self._is_idle:
            logger.warning(
                "a client speaks HTTPS, and this port HTTP: use http:// in its URL, or start the "
                "server with --ssl-certfile and --ssl-keyfile"
            )
        super().data_received(data)
        if self.transport.is_closing() or self._is_lingering:
            return
        if self._is_in_head and self._head_bytes > MAX_HEAD_BYTES:
            limit = (
                f"the headers are larger than {MAX_HEAD_BYTES} bytes: send fewer or shorter ones"
            )
            self.transport.write(_error(431, limit))
            self._linger(LINGER_TIMEOUT_S)
        elif self._is_idle and self._head_timer is None and self.timeout_keep_alive_task is None:
            # The timer covers connections whose first bytes do not begin a request.
            self._start_head_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP with the reason, which uvicorn does not pass on."""
        reason = sys.exc_info()[1]
        text = f"the request is not valid HTTP: {reason}" if reason else msg
        self.transport.write(_error(400, text))
        self.transport.close()

    def on_message_begin(self) -> None:
        """Handle the first byte of a request."""
        super().on_message_begin()
        if not self._is_in_head:
            self._is_in_head = True
            self._head_bytes = 0
        if self._head_timer is None:
            self._start_head_timer()

    def on_headers_complete(self) -> None:
        """Handle the end of the headers."""
        self._is_in_head = False
        self._stop_head_timer()
        self._is_in_body = True
        self._body_left = _content_length(self.headers)
        self._body_deadline = self.loop.time() + self.body_timeout_s
        self._start_body_timer(self.body_timeout_s + BODY_GRACE_S)
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)
        if self.scope["http_version"] == "1.0":
            # HTTP 1.0 has no chunked encoding: a body without a length ends when the connection
            # closes.
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = _ANY_LENGTH
        self.cycle.transport = _ClosesAfterBody(self.transport, self)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        """Handle a part of a body."""
        if self._body_left is not None:
            self._body_left -= len(body)
        if self.cycle.response_complete:
            self._count_discarded(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Handle the end of a request."""
        self._is_in_body = False
        self._stop_body_timer()
        super().on_message_complete()
        if self.cycle.response_complete and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """Handle the end of a response; discard the rest of the request body for a limited time."""
        if self._is_lingering:
            self.server_state.total_requests += 1
            return  # the connection accepts no further request
        super().on_response_complete()
        if self._is_in_body and not self.transport.is_closing():
            self._start_body_timer(self._linger_s)

    def close_after_body(self) -> None:
        """Close the connection: at once, or after the rest of a body has arrived or taken too
        long.
        """
        if self._is_in_body and not self.transport.is_closing():
            self._linger(self._linger_s)
        else:
            self.transport.close()

    @property
    def _is_idle(self) -> bool:
        """Whether no request is in progress."""
        has_answered = self.cycle is None or self.cycle.response_complete
        return has_answered and not self._is_in_body and not self.pipeline

    @property
    def _linger_s(self) -> float:
        """Seconds to keep discarding; only a few if the client has used up the time for its
        body.
        """
        is_late = self.loop.time() >= self._body_deadline
        return BODY_GRACE_S if is_late else LINGER_TIMEOUT_S

    def _linger(self, seconds: float) -> None:
        """Close this side of the connection, and discard what the client still sends."""
        self._is_lingering = True
        self._stop_head_timer()
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._start_body_timer(seconds)

    def _discard(self, data: bytes) -> None:
        self._count_discarded(len(data))
        if self._body_left is not None and self._is_in_body:
            self._body_left -= len(data)
            if self._body_left <= 0:
                self.transport.close()

    def _count_discarded(self, num_bytes: int) -> None:
        self._num_discarded += num_bytes
        if self._num_discarded > MAX_LINGER_BYTES:
            self.transport.close()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up_head(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def _start_body_timer(self, seconds: float) -> None:
        self._stop_body_timer()
        self._body_timer = self.loop.call_later(seconds, self._give_up_body)

    def _stop_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _give_up_body(self) -> None:
        self._body_timer = None
        if self.transport.is_closing():
            return
        is_answered = self._is_lingering or self.cycle is None or self.cycle.response_started
        if not is_answered and self.flow.read_paused:
            # The server has paused reading because the application is still loading.
            self._start_body_timer(self.body_timeout_s)
            return
        if is_answered:
            self.transport.close()
        else:
            late = f"the body did not arrive within {self.body_timeout_s:g} s (--body-timeout)"
            self.transport.write(_error(408, late))
            self._linger(BODY_GRACE_S)


def _error(status: int, message: str) -> bytes:
    """Return a whole response with an error, which ends the connection."""
    body = json.dumps(openai_error(status, message)).encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


def _without_upgrade(data: bytes) -> bytes:
    """Return bytes that begin in the headers of a request, without an offer to use HTTP/2.

    A server may ignore the offer, but the parser would also ignore the body of the request. Java's
    HttpClient makes this offer in each request.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    changed, count = _UPGRADE_TO_HTTP2.subn(_IGNORED, head + end)
    return changed + rest if count else data


def with_body_timeout(seconds: float) -> type[BoundedHttpProtocol]:
    """Return a protocol class with this timeout for request bodies."""

    class Protocol(BoundedHttpProtocol):
        body_timeout_s = seconds

    return Protocol


class _ClosesAfterBody:
    """A transport for writing responses, which waits for the rest of the body when it is closed."""

    def __init__(self, transport: Any, protocol: BoundedHttpProtocol) -> None:
        self._transport = transport
        self._protocol = protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        self._protocol.close_after_body()


class _AnyLength(int):
    """The length of a body whose length is not known. It is never exceeded."""

    def __lt__(self, other: object) -> bool:
        return False

    def __sub__(self, other: object) -> "_AnyLength":
        return self


_ANY_LENGTH = _AnyLength(0)


def _content_length(headers: list[tuple[bytes, bytes]]) -> int | None:
    value = dict(headers).get(b"content-length", b"")
    return int(value[:20]) if value.isdigit() else None
