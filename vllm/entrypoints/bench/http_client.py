"""A small HTTP/1.1 client for measuring: connections are kept, bodies are handed on as they come.

The time of a piece of a body is taken when the socket gives it, before anything is parsed. One
request at a time on a connection; no pipelining, redirects, proxies or cookies.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

from vllm.errors import ConfigError

OnBody = Callable[[bytes, float], None]
"""Called with each piece of a body and its arrival time, in seconds of `time.perf_counter()`."""

_MAX_KEPT_BYTES = 1 << 20


@dataclass(frozen=True)
class Response:
    """A complete response."""

    status: int
    body: bytes
    """Empty if it was passed to `on_body`; otherwise at most 1 MiB of it."""


class HttpClient:
    """Sends requests to one server; each running request has its own connection.

    Args:
        base_url: `http://host:port/prefix` or `https://...`.
        headers: sent with every request.
        verify_tls: False accepts any certificate.
        connect_timeout_s: for one connection.

    Raises:
        ConfigError: the URL has another form, or a header has a line break.
    """

    def __init__(
        self,
        base_url: str,
        *,
        headers: Mapping[str, str] | None = None,
        verify_tls: bool = True,
        connect_timeout_s: float = 30.0,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._host, self._port, self._prefix, is_tls = _split_url(self.base_url)
        self._tls = _tls_context(verify_tls) if is_tls else None
        self._connect_timeout_s = connect_timeout_s
        self._header_lines = _header_lines(
            {"Host": urlsplit(self.base_url).netloc.rpartition("@")[2], **(headers or {})}
        )
        self._idle: list[_Connection] = []

    async def request(
        self, method: str, path: str, body: bytes = b"", on_body: OnBody | None = None
    ) -> Response:
        """Send a request and wait for the end of its response.

        A body that is sent is JSON. A request that fails because the server closed a kept
        connection in the same moment is sent again, once. Cancelling closes the connection.

        Args:
            path: below the base URL, with its slash.
            on_body: takes the pieces of the body, if the status is 200.

        Raises:
            OSError: no connection, or it broke before the response had ended.
        """
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._header_lines}"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        message = head.encode("latin-1") + b"\r\n" + body
        connection = self._take_idle()
        if connection is not None:
            try:
                return await self._exchange(connection, message, on_body)
            except ConnectionError:
                if connection.has_response:
                    raise
        return await self._exchange(await self._connect(), message, on_body)

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _take_idle(self) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        connecting = loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        try:
            _, connection = await asyncio.wait_for(connecting, self._connect_timeout_s)
        except asyncio.TimeoutError:  # not the built-in one before Python 3.11
            raise ConnectionError(f"no connection within {self._connect_timeout_s:g} s") from None
        return connection

    async def _exchange(
        self, connection: "_Connection", message: bytes, on_body: OnBody | None
    ) -> Response:
        try:
            response = await connection.exchange(message, on_body)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)
        return response


class _Connection(asyncio.Protocol):
    """One socket. The `on_` methods are called by the parser."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._response: asyncio.Future[Response] | None = None
        self._on_body: OnBody | None = None
        self._received_s = 0.0
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._has_head = self._has_length = False
        self.has_response = False
        """Whether any byte of a response to the last request has arrived."""

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def exchange(self, message: bytes, on_body: OnBody | None) -> Response:
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the server closed the connection")
        self._response = asyncio.get_running_loop().create_future()
        self._on_body = on_body
        self._kept, self._kept_bytes = [], 0
        self._has_head = self._has_length = self.has_response = False
        self._transport.write(message)
        return await self._response

    # ---- of the socket --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]  # uvloop has classes of its own

    def data_received(self, data: bytes) -> None:
        self._received_s = time.perf_counter()
        self.has_response = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__ or error)  # what `on_body` raised
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"not an HTTP response: {error}"))

    def eof_received(self) -> None:
        return None  # close our side too

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if exc is None and self._has_head and not self._has_length:
            self.on_message_complete()  # a body without a length ends with the connection
        self._fail(exc or ConnectionResetError("the server closed the connection"))

    def _fail(self, error: BaseException) -> None:
        self.close()
        if self._response is not None and not self._response.done():
            self._response.set_exception(error)

    # ---- of the parser --------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        if self._on_body is not None and self._parser.get_status_code() == 200:
            self._on_body(body, self._received_s)
        elif self._kept_bytes < _MAX_KEPT_BYTES:
            self._kept.append(body)
            self._kept_bytes += len(body)

    def on_message_complete(self) -> None:
        if self._response is None or self._response.done():
            return
        status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.close()
        self._response.set_result(Response(status, b"".join(self._kept)))


def _split_url(url: str) -> tuple[str, int, str, bool]:
    """Host, port, path and whether it is TLS."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"not a URL: {url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ConfigError(f"not a URL such as http://localhost:8000: {url!r}")
    is_tls = parts.scheme == "https"
    return parts.hostname, port or (443 if is_tls else 80), parts.path, is_tls


def _header_lines(headers: Mapping[str, str]) -> str:
    lines = [f"{name}: {value}" for name, value in headers.items()]
    for line in lines:
        if "\r" in line or "\n" in line or not line.isascii():
            raise ConfigError(f"not an HTTP header: {line!r}")
    return "".join(f"{line}\r\n" for line in lines)


def _tls_context(verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
