"""What the middleware of the server shares: paths, headers, and refusals before any route.

Middleware here is plain ASGI: it sees every request, also those that no route takes, and adds
nothing to what a stream costs per event unless it has to.
"""

from starlette._utils import get_route_path
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.entrypoints.anthropic.errors import error_body
from vllm.entrypoints.openai.errors import ErrorInfo, describe_error

PROBES = frozenset({"/livez", "/startupz", "/readyz", "/health", "/ping"})
"""Health routes for probes: they need no key, are not logged, and neither limited nor delayed."""

PAGES = frozenset({"/", "/status", "/docs"})
"""Pages that hold nothing of this server: they ask for a key where what they show needs one."""

PAGE_FIGURES = frozenset({"/chat.json", "/status.json"})
"""What these pages ask for again and again, also before there is a model."""


def route_path(scope: Scope) -> str:
    """The path as the router sees it, without `root_path`: what guards a route must not look at
    anything else."""
    return get_route_path(scope)


def get_header(scope: Scope, name: bytes) -> str | None:
    """The first header of this name, given in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


async def refuse(scope: Scope, receive: Receive, send: Send, info: ErrorInfo) -> None:
    """Answer with an error in the format of the API that was asked."""
    is_anthropic = route_path(scope).startswith("/v1/messages")
    body = error_body(info) if is_anthropic else info.body()
    headers = dict(info.headers)
    await JSONResponse(body, status_code=info.status, headers=headers)(scope, receive, send)


def replay(message: Message, receive: Receive) -> Receive:
    """A `receive` that begins with a message that was already taken."""
    pending = [message]

    async def next_message() -> Message:
        return pending.pop() if pending else await receive()

    return next_message


class CatchErrors:
    """Innermost: answers what a route raised and no handler took, without details.

    Outside of it every request has a response, so that logs, request ids and CORS hold for all.
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
        except Exception as error:  # the edge of the server: one request fails, others go on
            if has_begun:
                raise  # a response that has begun cannot become an error: close the connection
            await refuse(scope, receive, send, describe_error(error))
