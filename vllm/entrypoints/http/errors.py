"""Map exceptions to status codes and error bodies. No other module does this.

                      status                  code of the body
RequestError          its own (400, 404)      its own, such as context_length_exceeded
CapacityError         its own (400, 409, 503)
RequestTimeoutError   504
EngineStoppedError    503
EngineDeadError       500                     engine_dead
WorkerCallError       500                     request_failed
GenerationError       500                     request_failed
pydantic              400, naming the fields
anything else         500, without details    internal_error

The type of an error depends on its status; each API has its own table of types. The code shows a
client whether only its request has failed or the whole engine.
"""

import re
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from vllm.entrypoints.http.error_format import openai_error
from vllm.entrypoints.http.sse import DONE, ClientDisconnected, EventStream, event
from vllm.entrypoints.http.validation_text import describe_validation
from vllm.errors import (
    CapacityError,
    EngineDeadError,
    EngineStoppedError,
    RequestError,
    RequestTimeoutError,
    VllmError,
    WorkerCallError,
)
from vllm.logger import init_logger
from vllm.outputs import CompletionOutput

logger = init_logger(__name__)

_REQUEST_FAILED = "request_failed"
_MAX_MESSAGE_CHARS = 4000
_DATA_URL = re.compile(r"(data:[^,\s'\"]{0,100},)[^\s'\"]+", re.IGNORECASE)
_BASE64 = re.compile(
    r"(?=[a-z0-9+/]*[A-Z])(?=[A-Z0-9+/]*[a-z])(?=[A-Za-z+/]*[0-9])[A-Za-z0-9+/]{64,}=*"
)
"""Text that is base64 of something, most likely: words and names are shorter, hexadecimal digits
have no letters of both cases, and paths have other characters."""
_RETRY_AFTER_S = "1"
_CLIENT_CLOSED_REQUEST = 499


class GenerationError(VllmError):
    """A request failed in the server while it ran (500)."""

    status = 500


@dataclass(frozen=True)
class ErrorInfo:
    """An error in the form that is sent to the client.

    Attributes:
        status: HTTP status.
        message: what is wrong, and what to change; valid Unicode text of bounded length.
        param: the wrong field of the request, or None.
        code: error code for programs, or None.
        headers: headers of the response.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Return the body in OpenAI's format."""
        param = None if self.param is None else _as_text(self.param)
        return openai_error(self.status, self.message, param, self.code)


ERROR_BODIES: dict[str, Callable[[ErrorInfo], dict[str, Any]]] = {}
"""Beginning of a path -> the function that makes the body of an error. An API with its own format
adds an entry; all other paths use `ErrorInfo.body`."""


def error_body(path: str, info: ErrorInfo) -> dict[str, Any]:
    """Return the body of an error in the format of the API to which a path belongs."""
    for beginning, write in ERROR_BODIES.items():
        if path.startswith(beginning):
            return write(info)
    return info.body()


def describe_error(error: BaseException) -> ErrorInfo:
    """Return the description of an error for the client. Unexpected exceptions are logged."""
    if isinstance(error, RequestValidationError):
        message, param = describe_validation(error.errors())
        return ErrorInfo(400, _as_text(message), param)
    if isinstance(error, HTTPException):
        return _describe_http(error)
    message = _as_text(str(error))
    if isinstance(error, RequestError):
        return ErrorInfo(error.status, message, error.param, error.code)
    if isinstance(error, CapacityError):
        headers = {"Retry-After": _RETRY_AFTER_S} if error.status == 503 else {}
        return ErrorInfo(error.status, message, headers=headers)
    if isinstance(error, RequestTimeoutError):
        return ErrorInfo(error.status, message)
    if isinstance(error, EngineStoppedError):
        return ErrorInfo(503, message, headers={"Retry-After": _RETRY_AFTER_S})
    if isinstance(error, EngineDeadError):
        return ErrorInfo(500, message, code="engine_dead")
    if isinstance(error, (GenerationError, WorkerCallError)):
        return ErrorInfo(500, message, code=_REQUEST_FAILED)
    logger.error("a request failed with an unexpected error", exc_info=error)
    message = "the server failed to answer this request; see its log"
    return ErrorInfo(500, message, code="internal_error")


def error_response(path: str, error: BaseException) -> JSONResponse:
    """Return the response for an exception, in the format of the API to which the path belongs."""
    info = describe_error(error)
    return JSONResponse(error_body(path, info), status_code=info.status, headers=dict(info.headers))


def error_events(error: BaseException) -> bytes:
    """Return the events that end an OpenAI stream after an error: the error, then [DONE].

    OpenAI's clients raise if an event has the key `error`.
    """
    return event(describe_error(error).body()) + DONE


def openai_stream(events: AsyncGenerator[bytes, None]) -> EventStream:
    """Return a stream that ends with [DONE]. An error after its first event is sent as an event."""
    return EventStream(events, end=DONE, on_error=error_events)


def refuse_failed(sample: CompletionOutput) -> None:
    """Raise the error of a sample that has failed.

    Raises:
        RequestError: the request could not run, because it asks for something that is not usable.
        GenerationError: the request has failed in the engine; states the reason.
    """
    if sample.is_refused:
        raise RequestError(str(sample.stop_reason))
    if sample.finish_reason == "error":
        raise GenerationError(str(sample.stop_reason))


def add_error_handlers(app: FastAPI) -> None:
    """Make all routes answer exceptions with the bodies of this module."""

    async def on_error(request: Request, error: Exception) -> Response:
        return error_response(get_route_path(request.scope), error)

    async def on_disconnect(_: Request, error: Exception) -> Response:
        # No client reads it; the access log shows the status.
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    for kind in (RequestValidationError, HTTPException, VllmError, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(ClientDisconnected, on_disconnect)


def _describe_http(error: HTTPException) -> ErrorInfo:
    status = error.status_code
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Error"
    return ErrorInfo(status, _as_text(str(error.detail) or phrase), headers=error.headers or {})


def _as_text(message: str) -> str:
    """Return the message, shortened, without surrogates (which a response cannot encode) and
    without quoted media content.
    """
    if len(message) > _MAX_MESSAGE_CHARS:
        message = message[:_MAX_MESSAGE_CHARS] + "..."
    message = _BASE64.sub("...", _DATA_URL.sub(r"\1...", message))
    return message.encode("utf-8", "replace").decode()
