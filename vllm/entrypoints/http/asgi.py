"""Share code between middleware: paths, headers, and error responses before any route.

Middleware of this server is plain ASGI: it sees every request, even without a route, and adds no
cost per event of a stream unless it has to.
"""

from starlette._utils import get_route_path
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.entrypoints.http.errors import ErrorInfo, describe_error, error_body

PROBES = frozenset({"/livez", "/startupz", "/readyz", "/health", "/ping"})
"""Health routes for probes: they need no key, are not logged, and neither limited nor delayed."""

PAGES = frozenset({"/", "/status", "/docs"})
"""Pages without data of this server. They ask for a key if the data that they load needs one."""

PAGE_FIGURES = frozenset({"/chat.json", "/status.json", "/status_buckets.json"})
"""Data that the web pages request repeatedly, even before the model is loaded."""


def route_path(scope: Scope) -> str:
    """Return the path as the router sees it, without `root_path`. Checks that protect routes must
    use only this path.
    """
    return get_route_path(scope)


def get_header(scope: Scope, name: bytes) -> str | None:
    """Return the first header with this name, which must be in lower case; None if there is
    none.
    """
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


async def refuse(scope: Scope, receive: Receive, send: Send, info: ErrorInfo) -> None:
    """Answer with an error in the format of the requested API."""
    body, headers = error_body(route_path(scope), info), dict(info.headers)
    await JSONResponse(body, status_code=info.status, headers=headers)(scope, receive, send)


def replay(message: Message, receive: Receive) -> Receive:
    """Return a `receive` that first returns a message that was already received."""
    pending = [message]

    async def next_message() -> Message:
        return pending.pop() if pending else await receive()

    return next_message


class SeenStatus:
    """The status of the response that passes through `send`; 0 before it begins."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def send(self, message: Message) -> None:
        """Send a message of the response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


class CatchErrors:
    """Innermost middleware: answers exceptions that no handler has handled, without details.

    So every request gets a response, and logs, request ids and CORS work for all of them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        has_begun = False

        async def watch(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except Exception as error:  # last resort: only this request fails
            if has_begun:
                # The response has begun and cannot become an error: closing the connection shows
                # the failure.
                raise
            await refuse(scope, receive, send, describe_error(error))
