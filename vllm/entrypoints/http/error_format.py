"""Create the body of an error in OpenAI's format. Loads no framework, so it can be used during the
start.
"""

from typing import Any

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""HTTP status -> type. Others are invalid_request_error below 500, and server_error from there."""


def openai_error(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the body of an error response.

    Args:
        status: HTTP status of the response.
        message: what is wrong, and what to change.
        param: the wrong field of the request, or None.
        code: error code for programs, or None.
    """
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
