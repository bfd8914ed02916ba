"""Answer requests while the application is still being imported.

Serves the probes, and the pages that show that the server is starting. Uses no framework, because
importing one takes longer than starting to listen.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from vllm.entrypoints.http.error_format import openai_error
from vllm.entrypoints.pages.web_page import load_page

_Message = MutableMapping[str, Any]
_Send = Callable[[_Message], Awaitable[None]]
_Receive = Callable[[], Awaitable[_Message]]
App = Callable[[_Message, _Receive, _Send], Awaitable[None]]
"""An ASGI application."""

_PHASE = {"phase": "loading the server", "done": 0, "total": 0, "eta_seconds": None}
_STARTING = json.dumps({"status": "starting", **_PHASE}).encode()
_CLOSING = json.dumps(openai_error(503, "the server is shutting down")).encode()
_FIGURES = json.dumps({"state": "starting", **_PHASE, "eta_s": None}).encode()
_ANSWERS = {
    "/livez": (200, b'{"status":"alive"}'),
    "/startupz": (503, _STARTING),
    "/readyz": (503, _STARTING),
    "/health": (503, b""),
    "/ping": (503, b""),
    "/chat.json": (200, _FIGURES),
    "/status.json": (200, _FIGURES),
}
_JSON = {"content-type": "application/json", "cache-control": "no-store"}


class StartupApp:
    """Answers probes and pages, and lets all other requests wait for the application.

    Args:
        root_path: root path of the server.
        pages: path -> name of its page.
    """

    def __init__(self, root_path: str = "", pages: Mapping[str, str] | None = None) -> None:
        self._root_path = root_path
        self._pages = pages or {}
        self._app: App | None = None
        self._is_decided = asyncio.Event()

    def switch_to(self, app: App) -> None:
        """Pass all requests to `app` from now on, the waiting requests first."""
        self._app = app
        self._is_decided.set()

    def close(self) -> None:
        """Refuse the waiting requests, because the application could not be loaded."""
        self._is_decided.set()

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        if self._app is None and scope["type"] == "http":
            path = scope["path"].removeprefix(self._root_path)
            if path in self._pages:
                page = load_page(self._pages[path])
                await _answer(send, 200, page.body, page.headers)
                return
            early = _ANSWERS.get(path)
            if early is not None:
                await _answer(send, *early)
                return
            await self._is_decided.wait()
            if self._app is None:
                await _answer(send, 503, _CLOSING)
                return
        if self._app is not None:
            await self._app(scope, receive, send)


async def _answer(
    send: _Send, status: int, body: bytes, headers: Mapping[str, str] = _JSON
) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    raw.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
