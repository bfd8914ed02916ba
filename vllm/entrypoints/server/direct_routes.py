"""Find the route of a request with a body by its path, without a search through all routes.

FastAPI tries one route after another, in nested routers, and opens two stacks for dependencies that
these routes do not have. That takes as long as the rest of a short request.
"""

from collections.abc import Iterable

from fastapi import APIRouter, FastAPI, Request
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm.entrypoints.http.asgi import replay, route_path
from vllm.entrypoints.http.body_route import BodyRoute


class DirectRoutes:
    """The innermost middleware: handles POST requests to the path of a `BodyRoute` itself.

    FastAPI handles all other requests, and requests without a body. In both cases the exception
    handlers of the server apply.

    Args:
        app: FastAPI inside its middleware.
        server: application whose exception handlers are used.
        routers: routers of the server, without a prefix.
    """

    def __init__(self, app: ASGIApp, server: FastAPI, routers: Iterable[APIRouter]) -> None:
        self.app = app
        self._server = server
        self._handlers = {
            route.path: route.get_route_handler()
            for router in routers
            for route in router.routes
            if isinstance(route, BodyRoute) and route.is_direct
        }
        self._direct: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_direct = scope["type"] == "http" and scope["method"] == "POST"
        if is_direct and route_path(scope) in self._handlers:
            # Made with the first request, when the server has all its handlers.
            if self._direct is None:
                handlers = self._server.exception_handlers
                known = {kind: handlers[kind] for kind in handlers if kind not in (500, Exception)}
                self._direct = ExceptionMiddleware(self._answer, known)
            await self._direct(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = _Request(scope, receive, send)
        if not await request.body():  # let FastAPI report what is missing
            empty = {"type": "http.request", "body": b"", "more_body": False}
            await self.app(scope, replay(empty, receive), send)
            return
        response = await self._handlers[route_path(scope)](request)
        await response(scope, receive, send)


class _Request(Request):
    """A request whose body is not copied if it comes in one message, as `BodyLimits` sends it."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            parts = [part async for part in self.stream() if part]
            self._body = b"".join(parts)
        return self._body
