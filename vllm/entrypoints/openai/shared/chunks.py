"""Encode chunks and whole bodies of the completion routes as bytes. This is the hot path of the
server.

The common part of all chunks of a stream is encoded once; for each chunk only its choice is
encoded.
"""

from typing import Any

import msgspec
from starlette.responses import Response

from vllm.entrypoints.openai.protocol.base import now, usage_dict
from vllm.entrypoints.openai.protocol.sampling import SamplingFields
from vllm.entrypoints.shared.context import ServerContext

_encode = msgspec.json.Encoder().encode


class ChunkWriter:
    """Writes the events of one stream.

    Args:
        response_id, kind, model: fields `id`, `object` and `model` of every chunk.
    """

    def __init__(self, response_id: str, kind: str, model: str) -> None:
        head = {"id": response_id, "object": kind, "created": now(), "model": model}
        self._start = b"data: " + _encode(head)[:-1] + b',"choices":['

    def choice(self, choice: dict[str, Any], usage: dict[str, Any] | None = None) -> bytes:
        """Return a chunk with one choice."""
        if usage is None:
            return self._start + _encode(choice) + b"]}\n\n"
        return self._start + _encode(choice) + b'],"usage":' + _encode(usage) + b"}\n\n"

    def usage(self, usage: dict[str, Any]) -> bytes:
        """Return the chunk with the usage, which has no choices."""
        return self._start + b'],"usage":' + _encode(usage) + b"}\n\n"


def json_response(body: Any) -> Response:
    """Encode a complete body as a JSON response."""
    return Response(_encode(body), media_type="application/json")


def includes_usage(context: ServerContext, body: SamplingFields) -> bool:
    """Return whether a stream ends with its usage, because the request or the server's settings ask
    for it.
    """
    return body.includes_usage or context.args.enable_force_include_usage


def usage_of(
    context: ServerContext,
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int | None = None,
    reasoning_tokens: int | None = None,
) -> dict[str, Any]:
    """Return the usage of a response. Cached tokens are included if the server reports them."""
    cached = (cached_tokens or 0) if context.args.enable_prompt_tokens_details else None
    return usage_dict(prompt_tokens, completion_tokens, cached, reasoning_tokens)
