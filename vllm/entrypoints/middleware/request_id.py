"""Accept or create an X-Request-Id, and return it with every response."""

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.entrypoints.http.asgi import get_header

_HEADER = b"x-request-id"
_MAX_CHARS = 128
_ALLOWED = re.compile(r"[A-Za-z0-9._:+/=-]+")


class RequestIds:
    """Gives each request an id that is safe to log and to return.

    Routes see the same id in the headers, because an unsafe id of a client is replaced.

    Args:
        app: the wrapped application.
        is_sent_back: whether to add the id to the headers of the response.
    """

    def __init__(self, app: ASGIApp, *, is_sent_back: bool = True) -> None:
        self.app = app
        self._is_sent_back = is_sent_back

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = get_header(scope, _HEADER)
        request_id = given if given is not None and is_safe(given) else uuid.uuid4().hex
        header = (_HEADER, request_id.encode())
        others = [pair for pair in scope["headers"] if pair[0] != _HEADER]
        scope = {**scope, "headers": [*others, header]}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self.app(scope, receive, send_with_id if self._is_sent_back else send)


def is_safe(request_id: str) -> bool:
    """Return whether an id is short and has only characters that are harmless in logs and
    headers.
    """
    return len(request_id) <= _MAX_CHARS and _ALLOWED.fullmatch(request_id) is not None
