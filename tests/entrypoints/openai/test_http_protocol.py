"""Test the limits on what a connection may send before a request is complete."""

import asyncio
import contextlib
import itertools
import json
import logging
import socket

import pytest
import uvicorn

from vllm.entrypoints.middleware.limits import BodyLimits, SizeLimit
from vllm.entrypoints.server import http_protocol
from vllm.entrypoints.server.http_protocol import (
    MAX_HEAD_BYTES,
    BoundedHttpProtocol,
    with_body_timeout,
)


async def app(scope, receive, send):
    num_bytes = 0
    while True:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    body = b"%d" % num_bytes
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def serve(application=app, protocol=BoundedHttpProtocol):
    """Start a server; return its port."""
    config = uvicorn.Config(application, http=protocol, ws="none", lifespan="off", log_config=None)
    config.load()
    state = uvicorn.server.ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: protocol(config, state, {}, _loop=loop), "127.0.0.1", 0
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()
        while state.connections:
            await asyncio.sleep(0.001)


async def talk(*parts, pause_s=0.0, **options):
    """Send the parts; return everything that the server answers until the connection ends."""
    async with serve(**options) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
        answer = await asyncio.wait_for(reader.read(), 120)
        writer.close()
        return answer


async def trickle(head, piece, **options):
    """Send a piece again and again, or several pieces, until the server reads no more; return its
    answer.
    """
    answer = b""

    async def read(reader):
        nonlocal answer
        while part := await reader.read(65536):
            answer += part

    pieces = itertools.repeat(piece) if isinstance(piece, bytes) else piece
    async with serve(**options) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        reading = asyncio.ensure_future(read(reader))
        with contextlib.suppress(ConnectionError):
            writer.write(head)
            while not writer.is_closing():
                writer.write(next(pieces))
                await writer.drain()
                await asyncio.sleep(0.005)
        await asyncio.gather(reading, return_exceptions=True)
    return answer


def at_most(max_bytes):
    return lambda path: SizeLimit(max_bytes, "--max-request-bytes")


def run(*parts, **options):
    return asyncio.run(talk(*parts, **options))


REQUEST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\nConnection: %s\r\n\r\n"


def test_an_ordinary_request_is_answered():
    assert run(REQUEST % (3, b"close"), b"abc").endswith(b"\r\n\r\n3")


@pytest.mark.parametrize("upgrade", [b"h2c", b"H2C ", b"h2"])
def test_a_client_that_offers_http_2_keeps_its_bodies(upgrade):
    head = b"POST / HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nHost: a\r\n"
    head += b"upgrade:%s\r\nHTTP2-Settings: AAMA\r\nContent-Length: 18\r\n" % upgrade
    body = b"\r\nUpgrade: h2c\r\n\r\n"  # the same text in a body is only text
    parts = (head + b"\r\n" + body, head + b"\r\n", body, head + b"Connection: close\r\n\r\n", body)
    assert run(*parts, pause_s=0.01).count(b"\r\n\r\n18") == 3


async def stream_app(scope, receive, send):
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for piece in (b"data: 1\n\n", b"", b"data: 2\n\n"):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("connection", [b"", b"Connection: keep-alive\r\n"])
def test_an_old_client_gets_a_stream_without_chunks(connection):
    head = b"GET / HTTP/%s\r\nHost: a\r\n" + connection + b"\r\n"
    told, _, body = run(head % b"1.0", application=stream_app).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in told and b"connection: close" in told
    assert body == b"data: 1\n\ndata: 2\n\n"


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
def test_an_old_client_gets_a_body_with_its_length(method):
    head = method + b" / HTTP/1.0\r\n\r\n"
    told, _, body = run(head).partition(b"\r\n\r\n")
    assert b"content-length: 1" in told and b"transfer-encoding" not in told
    assert body == (b"" if method == b"HEAD" else b"0")


def test_headers_that_are_too_long_are_refused_while_they_come():
    part = b"x-a: " + b"b" * 1000 + b"\r\n"
    parts = [b"GET / HTTP/1.1\r\nHost: a\r\n", *[part] * (MAX_HEAD_BYTES // 1000 + 1)]
    assert run(*parts, pause_s=0.001).startswith(b"HTTP/1.1 431 ")


def test_one_endless_header_is_refused():
    parts = [b"GET / HTTP/1.1\r\nHost: a\r\nx-a: ", *[b"b" * 1024] * 64]
    assert run(*parts, pause_s=0.001).startswith(b"HTTP/1.1 431 ")


def test_a_large_body_is_no_header():
    size = 4 * MAX_HEAD_BYTES
    answer = run(REQUEST % (size, b"close") + b"x" * size)
    assert answer.endswith(b"\r\n\r\n%d" % size)


def test_each_request_of_a_connection_has_its_own_bounds():
    size = MAX_HEAD_BYTES - 1000
    requests = [REQUEST % (size, b"keep-alive") + b"x" * size] * 3
    answer = run(*requests, REQUEST % (0, b"close"), pause_s=0.01)
    assert answer.count(b"HTTP/1.1 200 OK") == 4


def test_a_connection_that_sends_no_request_is_closed(monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.05)
    assert run() == b""
    assert run(b"GET / HT") == b""


async def refuse_at_once(scope, receive, send):
    """Refuse the request without reading its body, as for a missing key."""
    await send(
        {"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body", "body": b""})


async def never_answer(scope, receive, send):
    """Never answer, like a server that is still being loaded."""
    while (await receive())["type"] != "http.disconnect":
        pass


JSON_REQUEST = (
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
CHUNKED_REQUEST = (
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def send_and_read(port, data):
    """Send everything, then read to the end, as a plain client does."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(data)
        answer = b""
        while part := client.recv(65536):
            answer += part
        return answer


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_client_that_sends_everything_first_reads_413(is_chunked):
    size = 20 * 2**20
    data = JSON_REQUEST % size + b"x" * size
    if is_chunked:
        data = CHUNKED_REQUEST + b"%x\r\n" % size + b"x" * size + b"\r\n0\r\n\r\n"

    async def main():
        async with serve(BodyLimits(app, at_most(2**20), timeout_s=60.0, routers=())) as port:
            return await asyncio.to_thread(send_and_read, port, data)

    answer = asyncio.run(main())
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"1048576 bytes (--max-request-bytes)" in answer


def test_a_body_without_end_is_read_for_a_while_only(monkeypatch):
    monkeypatch.setattr(http_protocol, "MAX_LINGER_BYTES", 2**20)
    application = BodyLimits(app, at_most(100), timeout_s=60.0, routers=())
    pieces = iter([b"x" * 2**16] * 1000)
    answer = asyncio.run(trickle(JSON_REQUEST % 10**12, pieces, application=application))
    assert answer.startswith(b"HTTP/1.1 413 ") and next(pieces, None) is not None


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (b"FOO / HTTP/1.1\r\n\r\n", "Invalid method encountered"),
        (b"POST / HTTP/1.1\r\nContent-Length: abc\r\n\r\n", "Invalid character in Content-Length"),
        (CHUNKED_REQUEST + b"zz\r\n", "Invalid character in chunk size"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "Pause on PRI/Upgrade"),
    ],
)
def test_what_is_no_http_is_refused_with_the_reason(request_, reason):
    head, _, body = run(request_).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n") and b"connection: close" in head
    assert reason in json.loads(body)["error"]["message"]


def test_a_client_that_speaks_https_is_named_in_the_log(caplog):
    answer = run(bytes.fromhex("16030100a5010000a10303"))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert "start the server with --ssl-certfile" in caplog.text


@pytest.mark.parametrize("head", [JSON_REQUEST % 10**6, CHUNKED_REQUEST])
def test_a_trickled_body_ends_with_408(head, monkeypatch):
    monkeypatch.setattr(http_protocol, "BODY_GRACE_S", 0.05)
    piece = b"x" if b"Length" in head else b"1\r\nx\r\n"
    application = BodyLimits(app, at_most(2**20), timeout_s=0.05, routers=())
    answer = asyncio.run(
        trickle(head, piece, application=application, protocol=with_body_timeout(0.05))
    )
    assert answer.startswith(b"HTTP/1.1 408 ") and b"--body-timeout" in answer


def test_a_trickled_body_that_nobody_reads_ends_with_408(monkeypatch):
    monkeypatch.setattr(http_protocol, "BODY_GRACE_S", 0.05)
    head = JSON_REQUEST % 10**6
    options = {"application": never_answer, "protocol": with_body_timeout(0.05)}
    answer = asyncio.run(trickle(head, b"x", **options))
    assert answer.startswith(b"HTTP/1.1 408 ") and b"within 0.05 s (--body-timeout)" in answer


def test_a_trickled_body_that_was_refused_ends(monkeypatch):
    monkeypatch.setattr(http_protocol, "LINGER_TIMEOUT_S", 0.1)
    answer = asyncio.run(trickle(JSON_REQUEST % 10**6, b"x", application=refuse_at_once))
    assert answer.startswith(b"HTTP/1.1 401 ")


def test_empty_lines_between_requests_do_not_keep_a_connection(monkeypatch):
    async def hurry_afterwards(scope, receive, send):
        monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.1)
        await app(scope, receive, send)

    head = REQUEST % (3, b"keep-alive") + b"abc"
    answer = asyncio.run(trickle(head, b"\r\n", application=hurry_afterwards))
    assert answer.endswith(b"\r\n\r\n3")


def test_a_connection_can_be_used_again_when_a_refused_body_has_come():
    request = JSON_REQUEST % 5
    last = request.replace(b"Host: a", b"Host: a\r\nConnection: close")
    parts = (request, b"12345", request, b"12345", last, b"12345")
    answer = run(*parts, pause_s=0.01, application=refuse_at_once)
    assert answer.count(b"HTTP/1.1 401 ") == 3


def test_every_request_of_a_connection_is_told_that_its_client_has_left(caplog):
    """This includes requests before the newest one, whose answers could no longer be written."""
    events = []

    async def stream(scope, receive, send):
        await receive()
        events.append("begun")
        start = {"type": "http.response.start", "status": 200, "headers": []}
        await send(start)
        gone = asyncio.ensure_future(receive())
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
            await asyncio.sleep(0)
        events.append(gone.result()["type"])

    async def check():
        async with serve(stream) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 3)
            await reader.read(100)
            writer.transport.abort()
            await asyncio.wait_for(until(lambda: len(events) == 2), 60)

    asyncio.run(check())
    assert events == ["begun", "http.disconnect"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)
