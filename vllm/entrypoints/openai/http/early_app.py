"""What answers in the first moments, while the application is still being imported.

Knows no framework: importing one takes longer than starting to listen.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

_Message = MutableMapping[str, Any]
_Send = Callable[[_Message], Awaitable[None]]
_Receive = Callable[[], Awaitable[_Message]]
App = Callable[[_Message, _Receive, _Send], Awaitable[None]]
"""An ASGI application."""

_PHASE = {"phase": "loading the server", "done": 0, "total": 0, "eta_seconds": None}
_STARTING = json.dumps({"status": "starting", **_PHASE}).encode()
_CLOSING = json.dumps(
    {
        "object": "error",
        "message": "the server is shutting down",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }
).encode()
_ANSWERS = {
    "/livez": (200, b'{"status":"alive"}'),
    "/startupz": (503, _STARTING),
    "/readyz": (503, _STARTING),
    "/health": (503, b""),
    "/ping": (503, b""),
}


class EarlyApp:
    """Answers probes, and lets all other requests wait for the application.

    Args:
        root_path: of the server.
    """

    def __init__(self, root_path: str = "") -> None:
        self._root_path = root_path
        self._app: App | None = None
        self._is_decided = asyncio.Event()

    def pass_on_to(self, app: App) -> None:
        """All requests, those that wait first, go to `app` from now on."""
        self._app = app
        self._is_decided.set()

    def close(self) -> None:
        """There will be no application: those who wait are sent away."""
        self._is_decided.set()

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        if self._app is None and scope["type"] == "http":
            early = _ANSWERS.get(scope["path"].removeprefix(self._root_path))
            if early is not None:
                await _answer(send, *early)
                return
            await self._is_decided.wait()
            if self._app is None:
                await _answer(send, 503, _CLOSING)
                return
        if self._app is not None:
            await self._app(scope, receive, send)


async def _answer(send: _Send, status: int, body: bytes) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
