"""Test that bodies that are too large, too slow or of the wrong type never reach a route."""

import asyncio
import gzip
import json
import zlib

import pytest

from tests.entrypoints.openai.server_fakes import make_client
from vllm.entrypoints.middleware.decompression import ENCODINGS
from vllm.entrypoints.middleware.limits import BodyLimits, SizeLimit

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(("size", "status"), [(0, 200), (100, 200), (101, 413), (10_000, 413)])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_may_have_max_request_bytes(size, status, is_chunked):
    body = b"x" * size
    content = iter([body[:50], body[50:]]) if is_chunked else body
    response = make_client(max_request_bytes=100).post("/echo", content=content, headers=JSON)
    assert response.status_code == status
    if status == 413:
        assert "100 bytes (--max-request-bytes)" in response.json()["error"]["message"]
    else:
        assert response.json()["body"] == body.decode()


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/problem+json", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("", 415),
    ],
)
def test_a_body_must_be_json(content_type, status):
    headers = {"Content-Type": content_type}
    path = "/echo" if status == 200 else "/v1/completions"
    response = make_client().post(path, content=b"{}", headers=headers)
    assert response.status_code == status


def test_a_request_without_a_body_needs_no_type():
    assert make_client().post("/echo").status_code == 200


def run(messages, *, headers=(), timeout_s=120.0, max_bytes=100):
    """Return (what was sent, the body that the inner application got or None)."""
    sent, bodies = [], []

    async def app(scope, receive, send):
        bodies.append((await receive())["body"])

    async def receive():
        if not messages:
            await asyncio.sleep(60)
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/x", "root_path": "", "headers": headers}
    limits = BodyLimits(
        app, lambda _: SizeLimit(max_bytes, "--max-request-bytes"), timeout_s, routers=()
    )
    asyncio.run(limits(scope, receive, send))
    return sent, bodies[0] if bodies else None


CHUNKED = ((b"transfer-encoding", b"chunked"), (b"content-type", b"application/json"))


def part(body, more):
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_that_does_not_arrive_in_time_is_408():
    sent, body = run([part(b"{", True)], headers=CHUNKED, timeout_s=0.01)
    assert sent[0]["status"] == 408 and body is None


def test_no_more_is_read_than_the_limit():
    rest = [part(b"x" * 60, True) for _ in range(50)]
    sent, body = run(rest, headers=CHUNKED)
    assert sent[0]["status"] == 413 and body is None
    assert len(rest) == 48


def test_a_client_that_leaves_in_the_middle_gets_no_answer():
    sent, body = run([part(b"{", True), {"type": "http.disconnect"}], headers=CHUNKED)
    assert sent == [] and body is None


@pytest.mark.parametrize("length", [b"9" * 5000, b"101", b"0101"])
def test_a_declared_length_is_believed_when_it_is_too_large(length):
    sent, body = run([], headers=((b"content-length", length),))
    assert sent[0]["status"] == 413 and body is None


# ---- compressed bodies ------------------------------------------------------------------------


def raw_deflate(data):
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def in_two(data):
    return gzip.compress(data[:7], mtime=0) + gzip.compress(data[7:])


def zstd(data, **options):
    zstandard = pytest.importorskip("zstandard")
    return zstandard.ZstdCompressor(**options).compress(data)


PACKERS = {
    "zstd": lambda data: zstd(data[:9]) + zstd(data[9:]),
    "gzip": gzip.compress,
    "x-gzip": in_two,
    "deflate": zlib.compress,
    "Deflate": raw_deflate,
    "identity": bytes,
}


@pytest.mark.parametrize("encoding", PACKERS)
@pytest.mark.parametrize("size", [2, 200_000])
def test_a_compressed_body_is_unpacked(encoding, size):
    body = json.dumps({"a": [i * 7919 % 10007 for i in range(size // 2)]}).encode()
    headers = {**JSON, "Content-Encoding": encoding}
    answer = make_client().post("/echo", content=PACKERS[encoding](body), headers=headers)
    assert answer.status_code == 200
    assert answer.json()["body"] == body.decode()


@pytest.mark.parametrize(
    ("encoding", "content", "status", "text"),
    [
        ("gzip", gzip.compress(b"x" * 10**4, mtime=0), 413, "100 bytes (--max-request-bytes)"),
        ("deflate", zlib.compress(b"x" * 101), 413, "100 bytes (--max-request-bytes)"),
        ("gzip", b"{}", 400, "not valid gzip data"),
        ("gzip", gzip.compress(b"{}", mtime=0)[:-9], 400, "ends too early"),
        ("gzip", gzip.compress(b"{}", mtime=0) + b"rest", 400, "not valid gzip data"),
        ("deflate", b"\xff\xff", 400, "not valid deflate data"),
        ("deflate", zlib.compress(b"{}") + b"rest", 400, "not valid deflate data"),
        ("zstd", lambda: zstd(b"x" * 10**8), 413, "100 bytes (--max-request-bytes)"),
        ("zstd", lambda: b"{}" + zstd(b"{}"), 400, "not valid zstd data"),
        ("zstd", lambda: zstd(b"{}") + b"rest", 400, "not valid zstd data"),
        ("zstd", lambda: zstd(b"{}")[:-1], 400, "ends too early"),
        ("br", b"{}", 415, f"must be one of {', '.join(ENCODINGS)}, got 'br'"),
        ("gzip, gzip", b"{}", 415, f"must be one of {', '.join(ENCODINGS)}, got 'gzip, gzip'"),
    ],
)
def test_a_body_that_cannot_be_unpacked_is_refused(encoding, content, status, text):
    content = content() if callable(content) else content
    client = make_client(max_request_bytes=100)
    headers = {**JSON, "Content-Encoding": encoding}
    answer = client.post("/echo", content=content, headers=headers)
    assert answer.status_code == status
    assert text in answer.json()["error"]["message"]
    assert ("accept-encoding" in answer.headers) == (status == 415)
