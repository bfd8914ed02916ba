import asyncio
import shutil
import ssl
import subprocess
import sys
import threading
import time

import pytest

from tests.entrypoints.bench.fake_server import (
    CLOSE,
    STREAM_HEAD,
    FakeServer,
    chunk,
    plain,
)
from vllm.entrypoints.bench import http_client
from vllm.entrypoints.bench.http_client import HttpClient
from vllm.errors import ConfigError


def post(server, count=1, on_body=None, **options):
    """Return the results of `count` requests, sent one after the other; an exception is a
    result."""

    async def run():
        client = HttpClient(server.url, headers={"X-Key": "1"}, **options)
        results = []
        for _ in range(count):
            try:
                results.append(await client.request("POST", "/path", b"{}", on_body))
            except Exception as error:
                results.append(error)
        await client.close()
        return results

    return asyncio.run(run())


def test_a_connection_is_kept():
    with FakeServer(lambda request: [plain(200, "body")]) as server:
        responses = post(server, count=3)
    assert [(r.status, r.body) for r in responses] == [(200, b"body")] * 3
    assert server.num_connections == 1
    first = server.requests[0]
    assert (first.method, first.path, first.body) == ("POST", "/path", {})
    assert first.headers["host"] == server.url.removeprefix("http://")
    assert (first.headers["x-key"], first.headers["content-type"]) == ("1", "application/json")


def test_the_prefix_of_the_url_is_part_of_the_path():
    with FakeServer(lambda request: [plain(200, "")]) as server:
        server.url += "/prefix/"
        post(server)
    assert server.requests[0].path == "/prefix/path"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_chunked_body_arrives_however_it_is_cut(size):
    whole = STREAM_HEAD + chunk(b"one ") + chunk(b"two\r\n") + b"0\r\n\r\n"
    pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
    found = []
    with FakeServer(lambda request: pieces) as server:
        responses = post(server, count=2, on_body=lambda body, at_s: found.append(body))
    assert b"".join(found) == b"one two\r\n" * 2
    assert [(r.status, r.body) for r in responses] == [(200, b"")] * 2
    assert server.num_connections == 1


def test_pieces_have_the_time_at_which_they_came():
    times, has_come = [], threading.Event()

    def pieces(request):
        yield from (STREAM_HEAD, chunk(b"a"))
        assert has_come.wait(120)  # a slow client would otherwise read both chunks at once
        yield from (0.1, chunk(b"b"), b"0\r\n\r\n")

    def read(body, at_s):
        times.append(at_s)
        has_come.set()

    with FakeServer(pieces) as server:
        start = time.perf_counter()
        post(server, on_body=read)
    assert start < times[0] < times[1] - 0.05 < time.perf_counter()


def test_the_body_of_an_error_is_kept_and_not_handed_on():
    found = []
    with FakeServer(lambda request: [plain(400, "no")]) as server:
        (response,) = post(server, on_body=lambda body, at_s: found.append(body))
    assert (response.status, response.body, found) == (400, b"no", [])


def test_a_body_without_a_length_ends_with_the_connection():
    with FakeServer(lambda request: [b"HTTP/1.1 200 OK\r\n\r\nbody", CLOSE]) as server:
        responses = post(server, count=2)
    assert [r.body for r in responses] == [b"body", b"body"]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([CLOSE], "the server closed the connection"),
        ([b"HTTP/1.1 200 OK\r\n", CLOSE], "the server closed the connection"),
        ([STREAM_HEAD, chunk(b"a"), CLOSE], "payload is not completed"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab", CLOSE], "payload is not completed"),
        ([b"220 smtp.example.com\r\n"], "220 smtp.example.com"),
        ([STREAM_HEAD + b"zz\r\n"], "Invalid character in chunk size"),
    ],
)
def test_a_broken_response_is_a_connection_error(pieces, message):
    with FakeServer(lambda request: pieces) as server:
        (error,) = post(server)
    assert isinstance(error, ConnectionError)
    assert message in str(error)


@pytest.mark.parametrize("piece", [b"zz\r\n", CLOSE])
def test_a_response_that_breaks_after_a_piece_was_read_is_a_connection_error(piece, monkeypatch):
    monkeypatch.setattr(http_client, "LOOK_S", 0.01)
    has_come = threading.Event()

    def pieces(request):
        yield from (STREAM_HEAD, chunk(b"a"))
        assert has_come.wait(120)
        yield piece

    with FakeServer(pieces) as server:
        (error,) = post(server, on_body=lambda body, at_s: has_come.set())
    assert isinstance(error, ConnectionError)
    assert ("payload is not completed" if piece == CLOSE else "chunk size: b'zz'") in str(error)


def test_a_request_on_a_connection_that_was_closed_meanwhile_is_sent_again():
    answers = iter([[plain(200, "1")], [CLOSE], [plain(200, "2")]])
    with FakeServer(lambda request: next(answers)) as server:
        responses = post(server, count=2)
    assert [r.body for r in responses] == [b"1", b"2"]
    assert (len(server.requests), server.num_connections) == (3, 2)


def test_a_request_that_was_answered_in_part_is_not_sent_again():
    answers = iter([[plain(200, "1")], [STREAM_HEAD, CLOSE]])
    with FakeServer(lambda request: next(answers)) as server:
        _, error = post(server, count=2)
    assert isinstance(error, ConnectionError)
    assert len(server.requests) == 2


def test_an_exception_of_the_reader_reaches_its_caller():
    def read(body, at_s):
        raise ValueError("not JSON")

    with FakeServer(lambda request: [STREAM_HEAD, chunk(b"a"), 5.0]) as server:
        (error,) = post(server, on_body=read)
    assert isinstance(error, ValueError)


def test_cancelling_closes_the_connection():
    endless = [STREAM_HEAD, *([chunk(b"a"), 0.005] * 100_000)]

    async def run(url):
        has_begun = asyncio.Event()
        client = HttpClient(url)
        request = client.request("POST", "/", b"", lambda body, at_s: has_begun.set())
        task = asyncio.ensure_future(request)
        await asyncio.wait_for(has_begun.wait(), 120)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await client.close()

    with FakeServer(lambda request: endless) as server:
        asyncio.run(run(server.url))
        deadline = time.monotonic() + 120
        while not server.num_aborted and time.monotonic() < deadline:
            time.sleep(0.01)
    assert server.num_aborted == 1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_a_certificate_is_checked_unless_told_otherwise(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"),
            *("-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=other"),
            *("-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    with FakeServer(lambda request: [plain(200, "body")], tls=context) as server:
        (refused,) = post(server)
        (response,) = post(server, verify_tls=False)
    assert isinstance(refused, ConnectionError) and "certificate verify failed" in str(refused)
    assert response.body == b"body"


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x", "http://", "http://x:y", "http://x?a"]
)
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match="not a URL"):
        HttpClient(url)


def test_a_header_cannot_smuggle_another():
    with pytest.raises(ConfigError, match="not an HTTP header"):
        HttpClient("http://x", headers={"A": "b\r\nC: d"})


def test_a_missing_library_is_told_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(ConfigError, match=r"pip install 'vllm\[bench\]'"):
        HttpClient("http://x")
