"""HTTP on a connection, with limits of size and time that the parser does not have.

Every connection ends, whatever its client does: a timer runs whenever no response is being made.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 2**10
"""Request line and headers of one request."""
HEAD_TIMEOUT_S = 30.0
"""From the connection, or the first byte of a request, to the end of its headers."""
BODY_TIMEOUT_S = 60.0
"""From the end of the headers to the end of the body, when the server does not say."""
LINGER_TIMEOUT_S = 15.0
"""For the rest of a body that was answered before it had come, so that its client reads the answer
and not a reset of the connection."""
MAX_LINGER_BYTES = 64 * 2**20
"""Of such a rest."""

_BODY_GRACE_S = 2.0
"""For the application to answer 408 itself, and for its client to read that."""
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedHttpProtocol(HttpToolsProtocol):
    """Cuts connections whose requests are too long, or take too long, in head or body.

    A connection that is to be closed while a body still comes is closed after it: closing at once
    would reset the connection, and the answer be lost on its way.

    Attributes:
        body_timeout_s: for a body to arrive.
    """

    body_timeout_s = BODY_TIMEOUT_S

    _head_bytes = 0
    _is_in_head = True
    _is_in_body = False
    _is_lingering = False
    _body_left: int | None = None
    """Bytes of the body that have not come; None: not known."""
    _body_deadline = 0.0
    _num_discarded = 0
    _head_timer: asyncio.TimerHandle | None = None
    _body_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a first request."""
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_head_timer()
        self._stop_body_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes in, in pieces: only what belongs to a head counts as one."""
        if self._is_lingering:
            self._discard(data)
            return
        if self._is_in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing() or self._is_lingering:
            return
        if self._is_in_head and self._head_bytes > MAX_HEAD_BYTES:
            self.transport.write(_TOO_LARGE)
            self._linger(LINGER_TIMEOUT_S)
        elif self._is_idle and self._head_timer is None and self.timeout_keep_alive_task is None:
            self._start_head_timer()  # bytes that begin no request yet

    def on_message_begin(self) -> None:
        """The parser has seen the first byte of a request."""
        super().on_message_begin()
        if not self._is_in_head:
            self._is_in_head = True
            self._head_bytes = 0
        if self._head_timer is None:
            self._start_head_timer()

    def on_headers_complete(self) -> None:
        """The parser has seen the end of the headers."""
        self._is_in_head = False
        self._stop_head_timer()
        self._is_in_body = True
        self._body_left = _content_length(self.headers)
        self._body_deadline = self.loop.time() + self.body_timeout_s
        self._start_body_timer(self.body_timeout_s + _BODY_GRACE_S)
        super().on_headers_complete()
        self.cycle.transport = _ClosesAfterBody(self.transport, self)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        """The parser has seen a part of a body."""
        if self._body_left is not None:
            self._body_left -= len(body)
        if self.cycle.response_complete:
            self._count_discarded(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The parser has seen the end of a request."""
        self._is_in_body = False
        self._stop_body_timer()
        super().on_message_complete()
        if self.cycle.response_complete and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """The application has answered; what is left of the body is passed over, for a while."""
        if self._is_lingering:
            self.server_state.total_requests += 1
            return  # the connection takes no further request
        super().on_response_complete()
        if self._is_in_body and not self.transport.is_closing():
            self._start_body_timer(self._linger_s)

    def close_after_body(self) -> None:
        """Close the connection: at once, or when the body has come or taken too long."""
        if self._is_in_body and not self.transport.is_closing():
            self._linger(self._linger_s)
        else:
            self.transport.close()

    @property
    def _is_idle(self) -> bool:
        """No request has come of which the answer is not finished."""
        has_answered = self.cycle is None or self.cycle.response_complete
        return has_answered and not self._is_in_body and not self.pipeline

    @property
    def _linger_s(self) -> float:
        """A client that has used up the time for its body gets little more."""
        is_late = self.loop.time() >= self._body_deadline
        return _BODY_GRACE_S if is_late else LINGER_TIMEOUT_S

    def _linger(self, seconds: float) -> None:
        """Tell the client that nothing more comes, and pass over what it still sends."""
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
            # It is the server that does not read: the application is still being loaded.
            self._start_body_timer(self.body_timeout_s)
            return
        if is_answered:
            self.transport.close()
        else:
            self.transport.write(_TOO_SLOW)
            self._linger(_BODY_GRACE_S)


def with_body_timeout(seconds: float) -> type[BoundedHttpProtocol]:
    """The protocol, with a time for bodies to arrive."""

    class Protocol(BoundedHttpProtocol):
        body_timeout_s = seconds

    return Protocol


class _ClosesAfterBody:
    """The transport as the maker of a response sees it: closing waits for the rest of the body."""

    def __init__(self, transport: Any, protocol: BoundedHttpProtocol) -> None:
        self._transport = transport
        self._protocol = protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        self._protocol.close_after_body()


def _content_length(headers: list[tuple[bytes, bytes]]) -> int | None:
    value = dict(headers).get(b"content-length", b"")
    return int(value[:20]) if value.isdigit() else None
