"""What a connection may send before a request is complete."""

import asyncio

import uvicorn

from vllm.entrypoints.openai.http import http_protocol
from vllm.entrypoints.openai.http.http_protocol import MAX_HEAD_BYTES, BoundedHttpProtocol


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


async def talk(*parts, pause_s=0.0):
    """What a server answers to the parts, to the end of the connection."""
    config = uvicorn.Config(
        app, http=BoundedHttpProtocol, ws="none", lifespan="off", log_config=None
    )
    config.load()
    state = uvicorn.server.ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: BoundedHttpProtocol(config, state, {}, _loop=loop), "127.0.0.1", 0
    )
    try:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
        answer = await asyncio.wait_for(reader.read(), 120)
        writer.close()
        return answer
    finally:
        server.close()
        await server.wait_closed()


def run(*parts, **options):
    return asyncio.run(talk(*parts, **options))


REQUEST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\nConnection: %s\r\n\r\n"


def test_an_ordinary_request_is_answered():
    assert run(REQUEST % (3, b"close"), b"abc").endswith(b"\r\n\r\n3")


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
