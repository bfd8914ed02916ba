"""Log one line for each HTTP request, at the end of its response."""

import logging
import time
from urllib.parse import quote

from starlette.types import ASGIApp, Receive, Scope, Send

from vllm.entrypoints.http.asgi import PAGE_FIGURES, PROBES, SeenStatus, get_header, route_path
from vllm.logger import init_logger

logger = init_logger(__name__)

_QUIET = PROBES | PAGE_FIGURES | {"/metrics"}
"""Paths that probes and pages request every few seconds: logged at level DEBUG."""
_MAX_PATH_CHARS = 200


class AccessLog:
    """Logs client, method, path, status and time; never headers, queries or bodies."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        level = logging.DEBUG if route_path(scope) in _QUIET else logging.INFO
        if not logger.isEnabledFor(level):
            await self.app(scope, receive, send)
            return
        start = time.perf_counter()
        seen = SeenStatus(send)
        try:
            await self.app(scope, receive, seen.send)
        finally:  # status 0: the client disconnected before the response
            _log(level, scope, seen.status, time.perf_counter() - start)


def _log(level: int, scope: Scope, status: int, seconds: float) -> None:
    client = ":".join(map(str, scope["client"])) if scope.get("client") else "-"
    path = quote(scope["path"], safe="/:@!$&'()*+,;=~")[:_MAX_PATH_CHARS]
    fields = {
        "client": client,
        "method": scope["method"],
        "path": path,
        "status": status,
        "duration_ms": round(seconds * 1000, 1),
        "request_id": get_header(scope, b"x-request-id"),
    }
    logger.log(
        level,
        '%s "%s %s" %d in %.1f ms',
        client,
        scope["method"],
        path,
        status,
        seconds * 1000,
        extra={"fields": fields},
    )
