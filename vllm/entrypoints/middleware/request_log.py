"""Logs the parameters of each request, for --log-requests."""

import json
from functools import partial
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.entrypoints.shared import off_loop
from vllm.entrypoints.shared.asgi import get_header, route_path
from vllm.logger import init_logger

logger = init_logger(__name__)


class RequestLog:
    """Logs the JSON bodies of requests. Stands behind `BodyLimits`: a body is one message.

    Args:
        app: behind it.
        max_log_len: most characters of a text, and most entries of a list. None: all.
    """

    def __init__(self, app: ASGIApp, max_log_len: int | None) -> None:
        self.app = app
        self._max_log_len = max_log_len

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return

        async def watch() -> Message:
            message = await receive()
            if body := message.get("body"):
                is_large = len(body) >= off_loop.LARGE_BODY_BYTES
                await off_loop.run(partial(self._log, scope, body), is_large=is_large)
            return message

        await self.app(scope, watch, send)

    def _log(self, scope: Scope, data: bytes) -> None:
        try:
            body = msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return  # the answer will name the error
        text = json.dumps(shorten(body, self._max_log_len), ensure_ascii=True)
        path, request_id = route_path(scope), get_header(scope, b"x-request-id")
        fields = {"path": path, "request_id": request_id}
        logger.info("request %s to %s: %s", request_id or "-", path, text, extra={"fields": fields})


def shorten(value: Any, most: int | None) -> Any:
    """Shorten long texts and lists at any depth of a JSON value.

    >>> shorten({"prompt": "abcdef", "ids": [1, 2, 3, 4]}, 2)
    {'prompt': 'ab...', 'ids': [1, 2, '...']}
    """
    if most is None:
        return value
    if isinstance(value, str):
        return value if len(value) <= most else value[:most] + "..."
    if isinstance(value, list):
        kept = [shorten(item, most) for item in value[:most]]
        return kept if len(value) <= most else [*kept, "..."]
    if isinstance(value, dict):
        return {key: shorten(item, most) for key, item in value.items()}
    return value
