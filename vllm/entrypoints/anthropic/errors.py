"""Errors in Anthropic's format, for its routes: which type, which body.

What an error is, and its status, is decided by `errors`; here it is only worded otherwise.
"""

from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from vllm.entrypoints.http.body_route import BodyRoute, Handler
from vllm.entrypoints.http.sse import ClientDisconnected, EventStream, event
from vllm.entrypoints.openai.errors import ErrorInfo, describe_error

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
    """The body of an error.

    Of an error in the server, whose type is always api_error, `code` tells the kind.
    """
    default = "invalid_request_error" if info.status < 500 else "api_error"
    kind = _TYPES.get(info.status, default)
    detail = {"type": kind, "message": info.message}
    if kind == "api_error":
        detail["code"] = info.type
    return {"type": "error", "error": detail}


def error_event(error: BaseException) -> bytes:
    """The end of a stream that fails midway."""
    return event(error_body(describe_error(error)), "error")


class AnthropicRoute(BodyRoute):
    """A route that answers with these bodies whatever its handler raises."""

    def get_route_handler(self) -> Handler:
        """The handler of FastAPI, which reads and checks the body, with its errors caught."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except ClientDisconnected:
                raise  # nobody reads an answer
            except Exception as error:  # the edge of the server: one request fails, others go on
                return _error_response(error)

        return answer


class AnthropicStream(EventStream):
    """A stream that answers with these bodies when its events raise before the first one."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except Exception as error:  # the edge of the server, as above; nothing has been sent yet
            await _error_response(error)(scope, receive, send)


def _error_response(error: Exception) -> Response:
    info = describe_error(error)
    return JSONResponse(error_body(info), status_code=info.status, headers=dict(info.headers))
