"""Write errors in Anthropic's format.

The module `errors` decides about error and status; this module only converts the format.
"""

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm.entrypoints.anthropic.request import THREAD_UNSUPPORTED
from vllm.entrypoints.http.body_route import BodyRoute, Handler
from vllm.entrypoints.http.errors import ERROR_BODIES, ErrorInfo, describe_error, error_response
from vllm.entrypoints.http.sse import ClientDisconnected, EventStream, event

PATH = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_body(info: ErrorInfo) -> dict[str, Any]:
    """Return the body of an error response.

    For an error in the server, the type is always api_error and `code` names the kind.
    """
    default = "invalid_request_error" if info.status < 500 else "api_error"
    kind = _TYPES.get(info.status, default)
    detail: dict[str, Any] = {"type": kind, "message": info.message}
    if kind == "api_error":
        detail["code"] = info.code
    elif info.code == THREAD_UNSUPPORTED:
        detail["details"] = {"error_code": info.code, "unsupported": [info.param]}
    return {"type": "error", "error": detail}


ERROR_BODIES[PATH] = error_body


def error_event(error: BaseException) -> bytes:
    """Return the event that ends a stream after an error."""
    return event(error_body(describe_error(error)), "error")


class AnthropicRoute(BodyRoute):
    """A route whose errors have bodies in Anthropic's format, whatever its handler raises."""

    def get_route_handler(self) -> Handler:
        """Return FastAPI's handler, which reads and checks the body, wrapped to convert its
        errors.
        """
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except ClientDisconnected:
                raise  # the client has disconnected and gets no answer
            except Exception as error:  # last resort: only this request fails
                return error_response(PATH, error)

        return answer


class AnthropicStream(EventStream):
    """A stream whose errors have Anthropic's format: an error before the first event is a body, and
    a later one an event.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, on_error=error_event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except Exception as error:  # no response has begun yet, so it can be an error
            await error_response(PATH, error)(scope, receive, send)
