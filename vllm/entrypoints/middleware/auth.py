"""Check API keys before every route."""

import base64
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from vllm.entrypoints.http.asgi import PAGES, PROBES, get_header, refuse, route_path
from vllm.entrypoints.http.errors import ErrorInfo

_MESSAGE = "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"


class Authentication:
    """Refuses requests without a valid API key.

    No key is needed for health routes, for pages (which ask for the key themselves), and for
    OPTIONS (which browsers send without headers).

    Args:
        app: the wrapped application.
        keys: the accepted keys, at least one.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may_pass(scope):
            await _answer_401(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if scope["method"] == "OPTIONS" or route_path(scope) in PROBES | PAGES:
            return True
        given = _given_key(scope)
        if given is None:
            return False
        # Compare with all keys in constant time, so that the duration reveals nothing about them.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return any(matches)


def _given_key(scope: Scope) -> bytes | None:
    authorization = get_header(scope, b"authorization")
    if authorization is not None:
        kind, _, key = authorization.partition(" ")
        if kind.lower() == "basic":
            return _password(key.strip())
        return key.strip().encode("latin-1") if kind.lower() == "bearer" else None
    key_header = get_header(scope, b"x-api-key")
    return None if key_header is None else key_header.encode("latin-1")


def _password(credentials: str) -> bytes | None:
    """Return the password of Basic authentication (RFC 7617), which must be the key. The user name
    is ignored.
    """
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except ValueError:
        return None


async def _answer_401(scope: Scope, receive: Receive, send: Send) -> None:
    headers = {"WWW-Authenticate": "Bearer"}
    info = ErrorInfo(401, _MESSAGE, code="invalid_api_key", headers=headers)
    await refuse(scope, receive, send, info)
