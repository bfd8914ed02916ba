"""Create the requests that the benchmark sends to a server, and read their event streams.

Token counts come from `usage`, which the server is asked to send at the end of a stream. Pieces of
text are not counted as tokens.
"""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm.entrypoints.bench.http_client import HttpClient


@dataclass(frozen=True)
class BenchRequest:
    """A request to send: a prompt, and the number of tokens to ask for."""

    prompt: str | list[int]
    """Text, or token ids."""
    max_tokens: int
    num_prompt_tokens: int | None = None
    """Number of prompt tokens, if it is known beforehand; results use the server's count."""
    images: tuple[bytes, ...] = field(default=(), repr=False)
    """Files of pictures, for chats."""


@dataclass(slots=True)
class RequestRecord:
    """Result of one request. Times are in seconds of `time.perf_counter()`."""

    start_s: float
    """Time when the request was sent."""
    lag_s: float = 0.0
    """Delay against the planned arrival."""
    output_s: list[float] = field(default_factory=list)
    """When each piece with text arrived."""
    end_s: float = 0.0
    """When the response ended or failed."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    """Reason why the request failed; None if it completed."""
    is_cut: bool = False
    """Whether the benchmark ended the request early, so that it neither completed nor failed."""
    text: list[str] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.output_s[0] - self.start_s

    @property
    def e2el_s(self) -> float:
        """Seconds to the end of the response."""
        return self.end_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first one; None without a second token."""
        if self.num_output_tokens < 2:
            return None
        return (self.output_s[-1] - self.output_s[0]) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Seconds between pieces of the stream; a piece may contain several tokens."""
        return [b - a for a, b in zip(self.output_s, self.output_s[1:], strict=False)]


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    """An event of either endpoint, or an error body in either format."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | str | None = None
    object: str | None = None
    message: str | None = None


_DECODER = msgspec.json.Decoder(_Chunk)


class Backend:
    """An endpoint that streams tokens.

    Args:
        client: client of the server.
        path: path after the client's URL.
        is_chat: whether the endpoint takes messages instead of a prompt.
        fields: other fields of every request, such as model and temperature.
        keep_text: whether to keep the text of answers in the records.
    """

    def __init__(
        self,
        client: HttpClient,
        path: str,
        *,
        is_chat: bool,
        fields: Mapping[str, Any],
        keep_text: bool = False,
    ) -> None:
        self._client = client
        self._path = path
        self._is_chat = is_chat
        self._keep_text = keep_text
        self._fields = {**fields, "stream": True, "stream_options": {"include_usage": True}}

    async def send(self, request: BenchRequest, record: RequestRecord) -> None:
        """Send a request and fill its record. Errors are recorded; only a cancellation is
        raised.
        """
        reader = _StreamReader(record, self._keep_text)
        try:
            response = await self._client.request(
                "POST", self._path, self._body(request), reader.feed
            )
        except (OSError, ValueError) as error:
            record.error = f"{type(error).__name__}: {error}"
        else:
            record.error = reader.finish() if response.status == 200 else _refusal(response)

    def _body(self, request: BenchRequest) -> bytes:
        if self._is_chat:
            content = _content(request)
            prompt: dict[str, Any] = {"messages": [{"role": "user", "content": content}]}
            limit = "max_completion_tokens"
        else:
            prompt = {"prompt": request.prompt}
            limit = "max_tokens"
        return msgspec.json.encode({**prompt, limit: request.max_tokens, **self._fields})


def _content(request: BenchRequest) -> Any:
    """Return the content of a message: a text, or the images and the text."""
    if not request.images:
        return request.prompt
    urls = (f"data:image/jpeg;base64,{base64.b64encode(file).decode()}" for file in request.images)
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*parts, {"type": "text", "text": request.prompt}]


class _StreamReader:
    """Fills the record of one request from the pieces of its stream."""

    def __init__(self, record: RequestRecord, keep_text: bool) -> None:
        self._record = record
        self._keep_text = keep_text
        self._sse = SseParser()
        self._is_done = self._has_usage = False
        self._error: str | None = None

    def feed(self, piece: bytes, received_s: float) -> None:
        for data in self._sse.feed(piece):
            if data == b"[DONE]":
                self._is_done = True
            else:
                self._take(_DECODER.decode(data), received_s)

    def finish(self) -> str | None:
        """Return the error in the complete stream, or None."""
        if self._error is not None:
            return self._error
        if not self._is_done:
            return "the stream ended without [DONE]"
        if not self._has_usage:
            return "the stream has no usage, so its tokens cannot be counted"
        if not self._record.output_s:
            return "the stream has no output"
        return None

    def _take(self, chunk: _Chunk, received_s: float) -> None:
        record = self._record
        if chunk.error is not None or chunk.object == "error":
            self._error = _error_text(chunk)
        if chunk.usage is not None:
            self._has_usage = True
            record.num_prompt_tokens = chunk.usage.prompt_tokens
            record.num_output_tokens = chunk.usage.completion_tokens
        has_output = False
        for choice in chunk.choices:
            text = _output_of(choice)
            has_output = has_output or bool(text)
            if choice.finish_reason is not None:
                record.finish_reason = choice.finish_reason
                # A choice counts as output even if its tokens have no text, such as special tokens
                # or a part of a character.
                has_output = has_output or not record.output_s
                if choice.finish_reason == "error":
                    self._error = self._error or "finish_reason: error"
            if self._keep_text and text:
                record.text.append(text)
        if has_output:
            record.output_s.append(received_s)


def _output_of(choice: _Choice) -> str:
    """Return the text of a piece, or a line break for a tool call; empty if there is neither."""
    if choice.text is not None:
        return choice.text
    delta = choice.delta
    if delta is None:
        return ""
    text = delta.content or delta.reasoning_content or delta.reasoning
    return text or ("\n" if delta.tool_calls else "")


def _refusal(response: Any) -> str:
    try:
        text = _error_text(_DECODER.decode(response.body))
    except msgspec.DecodeError:
        text = response.body[:200].decode("utf-8", "replace")
    return f"HTTP {response.status}: {text}"


def _error_text(chunk: _Chunk) -> str:
    error: object = chunk.error or chunk.message
    if isinstance(error, dict):
        error = error.get("message") or error
    return " ".join(str(error or "no message").split())


_END = re.compile(rb"\r?\n\r?\n")
MAX_EVENT_BYTES = 16 << 20


class SseParser:
    """Splits the body of an event stream into events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the `data` of every event that this piece completes. Comments and names are
        ignored.

        Raises:
            ValueError: an event is too long.
        """
        text = self._rest + piece if self._rest else piece
        # A fast path, because nearly every piece is exactly one event with one line.
        if text.endswith(b"\n\n") and text.startswith(b"data: ") and text.count(b"\n") == 2:
            self._rest = b""
            return [text[6:-2]]
        *events, self._rest = _END.split(text)
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(
                f"the server sent an event of more than {MAX_EVENT_BYTES} bytes, which is too "
                "long to read"
            )
        return [data for event in events if (data := _data(event)) is not None]


def _data(event: bytes) -> bytes | None:
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line[:5] == b"data:"]
    return b"\n".join(lines) if lines else None
