"""What pages ask for, as a response."""

from typing import Any

import msgspec
from starlette.responses import Response


def fresh_json(value: Any) -> Response:
    """What is true now, and is not to be kept."""
    body = msgspec.json.encode(value)
    headers = {"content-type": "application/json", "cache-control": "no-store"}
    return Response(body, headers=headers)
