"""Process the lines of OpenAI's batch files: each input line is a request, each output line a
record.

Every line that is not blank gives one record, even if it is not valid.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import ASGIApp

from vllm.entrypoints.batch.in_process import call_app
from vllm.entrypoints.batch.sound_lines import SOUND_URLS, Fetch, check_sound_body, sound_form
from vllm.entrypoints.http.errors import describe_error
from vllm.entrypoints.openai.protocol.base import random_id
from vllm.entrypoints.openai.protocol.batch import URLS
from vllm.errors import RequestError
from vllm.utils.futures import end_tasks


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Body(msgspec.Struct):
    """The fields of a body that are checked here; the route checks the others."""

    stream: Any = None


class _CustomId(msgspec.Struct):
    """The id of a line that is otherwise not valid."""

    custom_id: str | None = None


@dataclass(slots=True)
class BatchCounts:
    """Progress of a batch."""

    num_written: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """Number of failed requests by error message."""
    _waiting: dict[int, bytes] = field(default_factory=dict)

    @property
    def num_failed(self) -> int:
        """Number of failed requests."""
        return self.failures.total()


async def run_lines(
    app: ASGIApp,
    lines: Iterable[bytes],
    sink: Callable[[bytes], object],
    max_concurrent: int,
    fetch: Fetch,
) -> BatchCounts:
    """Answer all lines of a batch.

    Args:
        app: the server's application; its engine is ready.
        lines: input lines, read as needed.
        sink: receives the records, each with a newline, in the order of the input.
        max_concurrent: maximum number of requests at the same time.
        fetch: downloads the audio files that lines name.

    Raises:
        OSError: from `lines` or `sink`; running requests are aborted.
    """
    counts = BatchCounts()
    numbered = enumerate(line for line in lines if line.strip())
    workers = [
        asyncio.create_task(_work(app, numbered, sink, counts, fetch))
        for _ in range(max_concurrent)
    ]
    try:
        await asyncio.gather(*workers)
    finally:
        await end_tasks(workers)
    return counts


async def _work(
    app: ASGIApp,
    numbered: Iterator[tuple[int, bytes]],
    sink: Callable[[bytes], object],
    counts: BatchCounts,
    fetch: Fetch,
) -> None:
    waiting = counts._waiting
    for index, line in numbered:
        record = await answer_line(app, line, fetch)
        if record["error"] is not None:
            counts.failures[_reason(record["error"])] += 1
        waiting[index] = msgspec.json.encode(record) + b"\n"
        # Write records in the order of the input: a record waits until all earlier ones are
        # complete.
        while (ready := waiting.pop(counts.num_written, None)) is not None:
            sink(ready)
            counts.num_written += 1


async def answer_line(app: ASGIApp, line: bytes, fetch: Fetch) -> dict[str, Any]:
    """Return the record of a line, as JSON values. Errors of the line or the route are part of the
    record.
    """
    try:
        request = read_line(line)
        given = bytes(request.body)
        if request.url in SOUND_URLS:
            status, body = await call_app(app, request.url, *await sound_form(given, fetch))
        else:
            status, body = await call_app(app, request.url, given)
        answer = msgspec.json.decode(body)
    except Exception as error:  # becomes this line's record; other lines are not affected
        info = describe_error(error)
        return _record(_custom_id(line), info.status, None, info.body()["error"])
    if status != 200:
        told = answer.get("error") if isinstance(answer, dict) else None
        return _record(request.custom_id, status, None, told or answer)
    return _record(request.custom_id, status, answer, None)


def read_line(line: bytes) -> _Line:
    """Read a line and check that it can be sent. The body is not checked against its route.

    Raises:
        RequestError: it cannot be sent.
    """
    try:
        request = msgspec.json.decode(line, type=_Line)
        body = msgspec.json.decode(request.body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"this line is not a valid request: {error}") from None
    if request.method != "POST":
        raise RequestError(f"method must be POST, got {request.method!r:.50}", param="method")
    if request.url not in URLS:
        raise RequestError(
            f"url must be one of {', '.join(URLS)}, got {request.url!r:.200}", param="url"
        )
    if body.stream:
        raise RequestError("stream is not available in a batch: leave it out", param="stream")
    if request.url in SOUND_URLS:
        check_sound_body(bytes(request.body))
    return request


def _reason(error: dict[str, Any]) -> str:
    return str(error.get("message") or "no reason given")


def _custom_id(line: bytes) -> str | None:
    try:
        return msgspec.json.decode(line, type=_CustomId).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _record(
    custom_id: str | None, status: int, body: Any, error: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "id": f"vllm-{random_id()}",
        "custom_id": custom_id,
        "response": {
            "status_code": status,
            "request_id": f"vllm-batch-{random_id()}",
            "body": body,
        },
        "error": error,
    }
