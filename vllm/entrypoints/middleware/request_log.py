"""Log the parameters of each request, for --log-requests."""

import json
import re
from functools import partial
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.entrypoints.http import off_loop
from vllm.entrypoints.http.asgi import get_header, route_path
from vllm.logger import init_logger

logger = init_logger(__name__)

_TENSORS = frozenset(("image_embeds", "image_grid_thw", "prompt_embeds"))
"""Keys whose texts, and lists of texts, are base64 of tensors."""
_MEDIA_KEYS = frozenset(("media_type", "format"))
"""Keys of an object whose `data` is base64: of an image of Anthropic's API, and of a sound."""
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/_-]{60,}[\r\n]{0,2}){2,}")
"""Text that no language has: base64, in one line or in lines as MIME has them."""
_DATA_URL = re.compile(r"\s*(data:[^,\s]{0,100},)", re.IGNORECASE)


class RequestLog:
    """Logs the JSON bodies of requests. Must be inside `BodyLimits`, so that a body is one message.

    Args:
        app: the wrapped application.
        max_log_len: maximum number of characters of a text, and of entries of a list. None: no
            limit.
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
            return  # the response reports the error
        text = json.dumps(shorten(without_media(body), self._max_log_len), ensure_ascii=True)
        path, request_id = route_path(scope), get_header(scope, b"x-request-id")
        fields = {"path": path, "request_id": request_id}
        logger.info("request %s to %s: %s", request_id or "-", path, text, extra={"fields": fields})


def without_media(value: Any) -> Any:
    """Replace the base64 content of images and audio at any depth of a JSON value by its length.

    Other long texts of only letters, digits and the signs of base64 are replaced as well: some
    clients send base64 in wrong fields, and the log must not have the content of a file.

    >>> without_media({"url": "data:image/png;base64,AAAA"})
    {'url': 'data:image/png;base64,... (26 characters)'}
    >>> without_media({"media_type": "image/png", "data": "AAAA"})
    {'media_type': 'image/png', 'data': '... (4 characters)'}
    >>> without_media({"image_embeds": {"image_embeds": ["AAAA"]}})
    {'image_embeds': {'image_embeds': ['... (4 characters)']}}
    >>> without_media(["see " + "AAAA" * 40 + "==", "AAAA"])
    ['see ... (160 characters)==', 'AAAA']
    """
    if isinstance(value, str):
        head = _DATA_URL.match(value)
        if head is not None:
            return f"{head[1]}... ({len(value)} characters)"
        return _BASE64.sub(lambda found: f"... ({len(found[0])} characters)", value)
    if isinstance(value, list):
        return [without_media(item) for item in value]
    if not isinstance(value, dict):
        return value
    hidden = _TENSORS if _MEDIA_KEYS.isdisjoint(value) else _TENSORS | {"data"}
    return {
        key: _without_base64(item) if key in hidden else without_media(item)
        for key, item in value.items()
    }


def _without_base64(value: Any) -> Any:
    if isinstance(value, str):
        return f"... ({len(value)} characters)"
    if isinstance(value, list):
        return [_without_base64(item) for item in value]
    return without_media(value)


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
