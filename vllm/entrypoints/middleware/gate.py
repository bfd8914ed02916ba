"""Hold or refuse requests while the engine is not ready."""

import asyncio
import math

from fastapi import FastAPI
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm.entrypoints.http.asgi import PAGE_FIGURES, PAGES, PROBES, refuse, replay, route_path
from vllm.entrypoints.http.errors import ErrorInfo, describe_error
from vllm.entrypoints.shared.context import ServerContext
from vllm.errors import EngineDeadError
from vllm.utils.futures import end_tasks

UNGATED = (
    PROBES
    | PAGES
    | PAGE_FIGURES
    | {"/version", "/load", "/metrics", "/openapi.json", "/server_info"}
)
"""Paths that work without a model."""

_MAX_EARLY_REQUESTS = 1024
"""Limit of requests that wait for the start, if `max_queued_requests` is not set."""
_UNKNOWN_ETA_S = 5
_MAX_RETRY_AFTER_S = 600


class Gate:
    """Passes requests to model routes only when the engine is ready.

    Before that, they wait or get 503 with Retry-After, depending on `early_requests`; a request
    whose client disconnects stops waiting. While the server drains they get 503, and 500 when the
    engine is dead. The bodies have already been read, so `receive` only reports that the client has
    disconnected.

    Args:
        app: the wrapped application.
        context: context of the server.
        routes: routes of the server; a request to an unknown path is answered at once.
    """

    def __init__(self, app: ASGIApp, context: ServerContext, routes: FastAPI) -> None:
        self.app = app
        self._context = context
        self._routes = routes
        self._num_waiting = 0
        most = context.args.max_queued_requests
        self._max_waiting = _MAX_EARLY_REQUESTS if most is None else most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope):
            await self.app(scope, receive, send)
            return
        if self._context.is_draining:
            await refuse(scope, receive, send, _DRAINING)
            return
        startup = self._context.engine.startup
        if startup.error is None and not startup.is_ready:
            if self._context.args.early_requests == "reject":
                await refuse(scope, receive, send, self._not_ready())
                return
            if self._num_waiting >= self._max_waiting:
                await refuse(scope, receive, send, self._too_many())
                return
            body = await receive()
            if not await self._wait(receive):
                return  # the client has disconnected
            receive = replay(body, receive)
        if startup.error is not None:
            await refuse(scope, receive, send, _failed(startup.error, self._context.is_draining))
            return
        await self.app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        context = self._context
        if context.engine.startup.is_ready and not context.is_draining:
            return True
        if route_path(scope) in UNGATED:
            return True
        return all(route.matches(scope)[0] is Match.NONE for route in self._routes.routes)

    async def _wait(self, receive: Receive) -> bool:
        """Wait until the start has succeeded or failed. Returns False if the client has
        disconnected.
        """
        ready = asyncio.ensure_future(self._context.engine.startup.wait())
        left = asyncio.ensure_future(receive())
        self._num_waiting += 1
        try:
            await asyncio.wait((ready, left), return_when=asyncio.FIRST_COMPLETED)
            return not left.done()
        finally:
            self._num_waiting -= 1
            await end_tasks((ready, left))

    def _not_ready(self) -> ErrorInfo:
        startup = self._context.engine.startup
        of = f", {startup.done} of {startup.total}" if startup.total else ""
        return _unavailable(
            f"the model is not ready yet ({startup.phase}{of}). Try again later",
            retry_after_s=startup.eta_seconds,
        )

    def _too_many(self) -> ErrorInfo:
        startup = self._context.engine.startup
        return _unavailable(
            f"the model is not ready yet, and {self._num_waiting} requests are waiting for it, "
            f"which is the limit (max_queued_requests). Try again later",
            retry_after_s=startup.eta_seconds,
        )


def _unavailable(message: str, *, retry_after_s: float | None) -> ErrorInfo:
    seconds = _UNKNOWN_ETA_S if retry_after_s is None else math.ceil(retry_after_s)
    headers = {"Retry-After": str(min(max(seconds, 1), _MAX_RETRY_AFTER_S))}
    return ErrorInfo(503, message, headers=headers)


_DRAINING = ErrorInfo(
    503,
    "the server is shutting down",
    headers={"Retry-After": str(_UNKNOWN_ETA_S), "Connection": "close"},
)


def _failed(error: BaseException, is_draining: bool) -> ErrorInfo:
    if is_draining:
        return _DRAINING
    return describe_error(
        error
        if isinstance(error, EngineDeadError)
        else EngineDeadError("the engine could not be started; see the log of the server")
    )
