"""Count requests in progress, for GET /load and for a graceful shutdown."""

from starlette.types import ASGIApp, Receive, Scope, Send

from vllm.entrypoints.http.asgi import PROBES, route_path
from vllm.entrypoints.shared.context import ServerContext

_NOT_COUNTED = PROBES | {"/load", "/metrics", "/version"}


class CountRequests:
    """Counts each request from its arrival until the end of its response."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self.app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) in _NOT_COUNTED:
            await self.app(scope, receive, send)
            return
        self._context.num_in_progress += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._context.num_in_progress -= 1
