"""A server in a thread that gives the answers of a test, without engine and framework."""

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

Pieces = Iterable[bytes | float]
"""Bytes that are written to the socket; a float is a pause in seconds."""

MODEL = {"id": "tiny", "root": "/no/such/model", "max_model_len": 4096}


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class FakeServer:
    """Serves inside a `with` block; `url` is its address.

    Args:
        answer: returns the pieces of the whole response to a POST.
        tls: serve with this certificate and key.
        metrics: texts of GET /metrics, one for each call; the last one is repeated.
    """

    answer: Callable[[Request], Pieces]
    tls: ssl.SSLContext | None = None
    metrics: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    """Of POST."""
    num_connections: int = 0
    num_aborted: int = 0
    """Connections that the client closed before the response had ended."""
    url: str = ""

    def __enter__(self) -> "FakeServer":
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self._is_up.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self.tls)
        self.url = f"http{'s' if self.tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_up.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # a transport closes in the next turn of the event loop

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while (request := await _read(reader)) is not None:
                for piece in self._pieces(request):
                    if isinstance(piece, float):
                        await asyncio.sleep(piece)
                    elif piece == CLOSE:
                        return
                    else:
                        writer.write(piece)
                        await writer.drain()
        except ConnectionError:
            self.num_aborted += 1
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._tasks.discard(task)
            writer.close()

    def _pieces(self, request: Request) -> Pieces:
        if request.method == "POST":
            self.requests.append(request)
            return self.answer(request)
        if request.path == "/v1/models":
            return [plain(200, json.dumps({"data": [MODEL]}))]
        if request.path == "/metrics" and self.metrics:
            return [plain(200, self.metrics.pop(0) if len(self.metrics) > 1 else self.metrics[0])]
        return [plain(404, "no such path")]


async def _read(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    method, path, _ = first.split(" ")
    return Request(method, path, headers, json.loads(body) if body else None)


# ---- responses ----------------------------------------------------------------------------

CLOSE = b"CLOSE"
"""Instead of a piece: close the connection."""

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def plain(status: int, text: str) -> bytes:
    body = text.encode()
    return f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def chunk(data: bytes) -> bytes:
    """Return one chunk of a chunked body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(data: object) -> bytes:
    """Return one server-sent event, as a chunk."""
    text = data if isinstance(data, str) else json.dumps(data)
    return chunk(f"data: {text}\n\n".encode())


def completion(text: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


def usage(num_prompt: int, num_output: int) -> bytes:
    tokens = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
    return event({"choices": [], "usage": tokens})


END = event("[DONE]") + b"0\r\n\r\n"


def stream(*pieces: bytes | float) -> Pieces:
    """Return a whole stream of these events."""
    return [STREAM_HEAD, *pieces, END]


def answer_of(num_tokens: int, pause_s: float = 0.0) -> Callable[[Request], Pieces]:
    """Return a handler of completions whose prompt is token ids. It sends a piece of text per
    token, then the usage.
    """

    def answer(request: Request) -> Pieces:
        pieces: list[bytes | float] = []
        for index in range(num_tokens):
            is_last = index == num_tokens - 1
            pieces += [pause_s, completion(" x", "length" if is_last else None)]
        return stream(*pieces, usage(len(request.body["prompt"]), num_tokens))

    return answer
