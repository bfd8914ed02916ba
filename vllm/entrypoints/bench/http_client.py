"""Send HTTP requests for the benchmarks. Based on aiohttp, which is the extra `vllm[bench]`.

A body is passed on in the pieces in which it arrives. The client does not follow redirects, use
proxies, keep cookies or decompress anything.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from vllm.errors import ConfigError

_CONNECT_TIMEOUT_S = 30.0
LOOK_S = 1.0
"""Seconds between two searches for connections that have failed."""

OnBody = Callable[[bytes, float], None]
"""Called with each piece of a body and its arrival time, in seconds of `time.perf_counter()`."""


@dataclass(frozen=True)
class Response:
    """A complete response."""

    status: int
    body: bytes
    """Body of the response; empty if it was passed to `on_body`."""


class HttpClient:
    """Sends requests to one server; each running request has its own connection.

    Create and close it inside the same event loop.

    Args:
        base_url: `http://host:port/prefix` or `https://...`.
        headers: headers that are sent with every request.
        verify_tls: False: accept any certificate.

    Raises:
        ConfigError: the URL has another form, a header has a line break, or aiohttp is not
            installed.
    """

    def __init__(
        self, base_url: str, *, headers: Mapping[str, str] | None = None, verify_tls: bool = True
    ) -> None:
        _check(base_url, headers or {})
        self.base_url = base_url.rstrip("/")
        self._aiohttp = aiohttp = _import_aiohttp()
        self._session = aiohttp.ClientSession(
            headers={"Accept-Encoding": "identity", **(headers or {})},
            connector=aiohttp.TCPConnector(limit=0, ssl=verify_tls),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        self._reading: set[Any] = set()
        """Responses whose body is being read."""
        self._look: asyncio.TimerHandle | None = None

    async def request(
        self, method: str, path: str, body: bytes = b"", on_body: OnBody | None = None
    ) -> Response:
        """Send a request and wait for the end of its response.

        The body is sent as JSON. If the connection breaks before the response begins, the request
        is sent once more, because the server may have closed an idle connection in the same moment.
        Cancelling closes the connection.

        Args:
            method: HTTP method.
            path: path after the base URL, with its slash.
            body: body to send.
            on_body: receives the pieces of the response body, if the status is 200.

        Raises:
            OSError: no connection, or it broke before the end of the response.
        """
        try:
            try:
                response = await self._send(method, path, body)
            except (self._aiohttp.ClientConnectorError, self._aiohttp.ServerTimeoutError):
                raise
            except self._aiohttp.ClientConnectionError:
                response = await self._send(method, path, body)
            async with response:
                self._watch(response)
                if on_body is None or response.status != 200:
                    return Response(response.status, await response.read())
                async for piece in response.content.iter_any():
                    on_body(piece, time.perf_counter())
                return Response(response.status, b"")
        except self._aiohttp.ClientError as error:
            if isinstance(error, self._aiohttp.ServerDisconnectedError):
                raise ConnectionError("the server closed the connection") from None
            # `message` lacks the URL, if the error has it.
            reason = getattr(error, "message", None) or error
            raise ConnectionError(" ".join(str(reason).split())) from None

    def _watch(self, response: Any) -> None:
        """Check regularly whether the connection of a response has failed; see `_end_failed`."""
        self._reading.add(response)
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_S, self._end_failed)

    def _end_failed(self) -> None:
        """Tell the readers of bodies whose connection has failed.

        If a server sends data that is not a valid chunk, aiohttp closes the connection. If the
        previous chunk was already read, aiohttp does not tell the reader, which would wait for
        ever.
        """
        self._look = None
        responses, self._reading = self._reading, set()
        for response in responses:
            if response.connection is None or response.content.exception() is not None:
                continue  # its body has been read, or has failed
            if (error := response.connection.protocol.exception()) is not None:
                response.content.set_exception(self._aiohttp.ClientPayloadError(str(error)))
            else:
                self._watch(response)

    async def close(self) -> None:
        """Close the idle connections."""
        if self._look is not None:
            self._look.cancel()
        await self._session.close()

    async def _send(self, method: str, path: str, body: bytes) -> Any:
        return await self._session.request(
            method,
            self.base_url + path,
            data=body or None,
            headers={"Content-Type": "application/json"} if body else None,
            allow_redirects=False,
        )


def _check(url: str, headers: Mapping[str, str]) -> None:
    try:
        parts = urlsplit(url)
        is_url = parts.port is None or parts.port > 0
    except ValueError as error:
        raise ConfigError(f"not a URL: {url!r}: {error}") from None
    if not is_url or parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ConfigError(f"not a URL such as http://localhost:8000: {url!r}")
    for name, value in headers.items():
        line = f"{name}: {value}"
        if "\r" in line or "\n" in line or not line.isascii():
            raise ConfigError(f"not an HTTP header: {line!r}")


def _import_aiohttp() -> Any:
    try:
        import aiohttp
    except ImportError as error:
        raise ConfigError(
            f"vllm bench serve needs aiohttp, which cannot be imported ({error}). "
            f"Install it with: pip install 'vllm[bench]'"
        ) from None
    return aiohttp
