"""One GET request to an address that was checked before. Redirects and names are handled elsewhere.

Proxies of the environment (HTTP_PROXY and the like) are not used: a proxy would resolve the name
again, and its result could not be checked.
"""

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from urllib.parse import quote

import httptools

_READ_BYTES = 2**16
_MAX_HEAD_BYTES = 2**16
CONNECT_S = 1.0
"""Until the next address of a host is tried: it may have one of IPv6 that cannot be reached."""
_PORTS = {"http": 80, "https": 443}
_PATH_CHARACTERS = "/%:@!$&'()*+,;=-._~?[]|^"
"""Characters of path and query that are sent as they are."""


class HTTPError(Exception):
    """The server's answer is not acceptable; str() says why."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The parts of a URL.

    Attributes:
        scheme: "http" or "https".
        host: host in the form of `normalize_host`.
        port: None: the default port.
        path: path with the query; quoted as in the URL.
    """

    scheme: str
    host: str
    port: int | None
    path: str

    def connect_port(self) -> int:
        """Return the port to connect to."""
        return self.port or _PORTS[self.scheme]

    def request(self) -> bytes:
        """Return the HTTP request as bytes."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        if self.connect_port() != _PORTS[self.scheme]:
            host = f"{host}:{self.port}"
        lines = (
            f"GET {quote(self.path or '/', safe=_PATH_CHARACTERS)} HTTP/1.1",
            f"Host: {host}",
            "User-Agent: vllm",
            "Accept: */*",
            "Accept-Encoding: identity",  # no compression: a few bytes could become gigabytes
            "Connection: close",
        )
        return "".join(f"{line}\r\n" for line in (*lines, "")).encode("ascii")


@dataclass
class Answer:
    """An HTTP answer that is being received; httptools calls its `on_` methods.

    Attributes:
        status: HTTP status; 0 until the headers are complete.
        headers: names in lower case; of several with one name, the first.
        body: content, only read for the status 200.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    is_complete: bool = False

    def __post_init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Parse received bytes.

        Raises:
            HTTPError: they are not valid HTTP.
        """
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self.is_complete:  # bytes after the end are ignored
                raise HTTPError("the answer is not valid HTTP") from None

    def close(self) -> None:
        """Drop the parser, which refers to this object, so that the content is freed in time."""
        del self._parser

    def on_message_begin(self) -> None:
        """Start a new message after an interim answer."""
        if self.is_complete:
            # Raising stops the parser.
            raise HTTPError("the server sent more bytes after the end of its answer")
        self.headers.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header."""
        self.headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        """Store the status, unless it is an interim answer."""
        status = self._parser.get_status_code()
        self.status = status if status >= 200 else 0

    def on_body(self, data: bytes) -> None:
        """Append a part of the content."""
        self.body += data

    def on_message_complete(self) -> None:
        """Note that the content is complete."""
        self.is_complete = self.status != 0

    @property
    def ends_with_connection(self) -> bool:
        """Whether only the end of the connection marks the end of the content."""
        return not {"content-length", "transfer-encoding"} & self.headers.keys()


class Budget:
    """Limit of all content that is fetched for one request.

    Args:
        max_bytes: maximum number of bytes of all answers together, including incomplete ones.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._num_left = max_bytes

    def count(self, num_bytes: int) -> None:
        """Add received bytes.

        Raises:
            HTTPError: the limit is exceeded.
        """
        self._num_left -= num_bytes
        if self._num_left < 0:
            raise HTTPError(
                f"the files at the URLs of the request have more than {self._max_bytes} bytes in "
                "total, which is the limit"
            )


async def get(target: Target, addresses: Sequence[str], max_bytes: int, budget: Budget) -> Answer:
    """Send a GET request and read the answer; its content only for the status 200.

    Args:
        target: server and path; the name of the server is sent as `Host`, and with TLS checked
            against the certificate.
        addresses: addresses of the host; the next one is tried if no connection can be made.
        max_bytes: limit of the content.
        budget: budget of the request; the answer is counted.

    Raises:
        HTTPError: the answer is malformed, compressed, incomplete or too large.
        OSError: no connection can be made, or it breaks.
    """
    reader, writer = await _connect(target, addresses)
    try:
        writer.write(target.request())
        await writer.drain()
        return await _read_answer(reader, max_bytes, budget)
    finally:
        writer.transport.abort()  # an orderly close would wait for the other side


async def _connect(
    target: Target, addresses: Sequence[str]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = tls_settings() if target.scheme == "https" else None
    connect = partial(
        asyncio.open_connection,
        port=target.connect_port(),
        ssl=context,
        server_hostname=target.host if context else None,
    )
    *others, last = addresses
    for address in others:
        try:
            return await asyncio.wait_for(connect(address), CONNECT_S)
        except (OSError, asyncio.TimeoutError):
            continue
    return await connect(last)


async def _read_answer(reader: asyncio.StreamReader, max_bytes: int, budget: Budget) -> Answer:
    answer = Answer()
    try:
        await _read_into(answer, reader, max_bytes, budget)
    finally:
        answer.close()
    return answer


async def _read_into(
    answer: Answer, reader: asyncio.StreamReader, max_bytes: int, budget: Budget
) -> None:
    num_head_bytes = 0
    while not answer.is_complete:
        if not (data := await reader.read(_READ_BYTES)):
            if answer.status and answer.ends_with_connection:
                return
            raise HTTPError("the connection ended before the answer was complete")
        num_known = len(answer.body)
        answer.feed(data)
        budget.count(len(answer.body) - num_known)
        if not answer.status:
            num_head_bytes += len(data)
            if num_head_bytes > _MAX_HEAD_BYTES:
                raise HTTPError(f"the head of the answer has more than {_MAX_HEAD_BYTES} bytes")
            continue
        if answer.status != 200:
            return
        if answer.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise HTTPError("the answer is compressed, although the request did not allow that")
        announced = answer.headers.get("content-length", "0").strip()
        # Content-Length may have any number of digits, but int() refuses very long numbers.
        if len(answer.body) > max_bytes or len(announced) > 18 or int(announced) > max_bytes:
            raise HTTPError(f"the answer must have at most {max_bytes} bytes, and has more")


@cache
def tls_settings() -> ssl.SSLContext:
    """Return the TLS settings, with the system's trusted authorities."""
    return ssl.create_default_context()
