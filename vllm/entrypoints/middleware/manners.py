"""Handle requests of monitors, proxies and browsers: HEAD, OPTIONS, and paths with additional
slashes.
"""

import re
from collections.abc import Iterable

from fastapi import APIRouter
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.entrypoints.http.asgi import get_header, route_path

_SLASHES = re.compile("//+")


class HttpManners:
    """Middleware that normalises paths and answers HEAD and OPTIONS, before keys, limits and
    routes.

    A slash at the end of a path, and additional ones in it, are removed. HEAD is
    answered like GET, without the body. OPTIONS is answered with the methods of the route; CORS
    answers the preflight requests of browsers.

    Args:
        app: the wrapped application.
        routers: routers of the server.
    """

    def __init__(self, app: ASGIApp, routers: Iterable[APIRouter]) -> None:
        self.app = app
        self._routes = [
            route for router in routers for route in router.routes if isinstance(route, Route)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope = _with_plain_path(scope)
        if scope["method"] == "HEAD":
            await self.app({**scope, "method": "GET"}, receive, _without_body(send))
            return
        is_preflight = get_header(scope, b"access-control-request-method") is not None
        if scope["method"] == "OPTIONS" and not is_preflight and (known := self._methods(scope)):
            answer = Response(status_code=204, headers={"Allow": ", ".join(sorted(known))})
            await answer(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _methods(self, scope: Scope) -> set[str]:
        """Return the HTTP methods that a path accepts; empty if no route has the path."""
        found: set[str] = set()
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                found |= route.methods or set()
        if "GET" in found:
            found.add("HEAD")
        return found | {"OPTIONS"} if found else found


def _with_plain_path(scope: Scope) -> Scope:
    given = route_path(scope)
    plain = _SLASHES.sub("/", "/" + given.strip("/"))
    if plain == given or not given:
        return scope
    path = scope["path"].removesuffix(given) + plain
    return {**scope, "path": path, "raw_path": path.encode()}


def _without_body(send: Send) -> Send:
    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_head
