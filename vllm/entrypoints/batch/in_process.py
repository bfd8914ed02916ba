"""Call the application like a client, without a socket."""

import asyncio

from starlette.types import ASGIApp, Message


async def call_app(
    app: ASGIApp, path: str, body: bytes, content_type: str = "application/json"
) -> tuple[int, bytes]:
    """POST a body to a route that does not stream. Cancelling the call acts like a client that
    disconnects.

    Args:
        app: the application.
        path: path of the route, in ASCII.
        body: body of the request.
        content_type: content type of the body.

    Returns:
        Status and body of the response.
    """
    status = 500
    pieces: list[bytes] = []
    is_sent = False
    has_ended = asyncio.Event()

    async def receive() -> Message:
        nonlocal is_sent
        if is_sent:
            await has_ended.wait()
            return {"type": "http.disconnect"}
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            pieces.append(message.get("body", b""))
            if not message.get("more_body"):
                has_ended.set()

    headers = [(b"content-type", content_type.encode()), (b"host", b"localhost")]
    headers.append((b"content-length", str(len(body)).encode()))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": ("localhost", 80),
        "state": {},
    }
    await app(scope, receive, send)
    return status, b"".join(pieces)
