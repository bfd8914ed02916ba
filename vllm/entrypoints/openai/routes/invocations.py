"""Serve POST /invocations, the route that SageMaker calls; the body decides which API is used.

The request is forwarded to the route of that API, so that fields, answers and errors are the same.
"""

from functools import partial

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from vllm.entrypoints.http import off_loop
from vllm.entrypoints.http.validation_text import NO_BODY
from vllm.entrypoints.openai.protocol.base import STREAMED
from vllm.errors import RequestError

router = APIRouter(tags=["sagemaker"])

PATH = "/invocations"
_TARGETS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("messages",), "/v1/chat/completions"),
    (("prompt",), "/v1/completions"),
    (("query", "documents"), "/v1/rerank"),
    (("text_1", "text_2"), "/v1/score"),
    (("input",), "/v1/embeddings"),
)
"""Keys that a body must have -> route; the first match counts."""
_TASKS = {"embed": "/v1/embeddings", "classify": "/classify", "pooling": "/pooling"}
"""Value of the key `task` -> route of a body with `input`."""


_BODY = {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}


@router.post(PATH, responses=STREAMED, openapi_extra={"requestBody": _BODY})
async def invoke(request: Request) -> Response:
    """Forward the request to the route that matches the keys of its body.

    `messages`: chat; `prompt`: completion; `input`: embeddings, or the route for `task` (embed,
    classify, pooling); `text_1` and `text_2`: scores; `query` and `documents`: reranking.
    """
    body = await request.body()
    if not body:
        raise RequestError(NO_BODY)
    off_loop.mark_request(len(body))
    target = await off_loop.run(partial(find_target, body))
    return _Forward(request, target, body)


def find_target(body: bytes) -> str:
    """Return the path of the route for a body.

    Raises:
        RequestError: the body is not a JSON object, or has none of the keys.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the body must be a JSON object: {error}") from None
    if "input" in fields and "task" in fields:
        task = bytes(fields["task"]).decode("utf-8", "replace").strip('"')
        if task not in _TASKS:
            raise RequestError(
                f"task must be one of {', '.join(_TASKS)}, got {task!r:.80}", param="task"
            )
        return _TASKS[task]
    for keys, path in _TARGETS:
        if fields.keys() >= set(keys):
            return path
    wanted = ", ".join(" and ".join(keys) for keys, _ in _TARGETS)
    raise RequestError(f"the body must have one of these: {wanted}")


class _Forward(Response):
    """A response that forwards the request to another route of the same application."""

    def __init__(self, request: Request, path: str, body: bytes) -> None:
        self._request = request
        self._path = path
        self._body = body
        self.background = None
        self.status_code = 200  # replaced by the status that the other route sends
        self.init_headers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removesuffix(PATH) + self._path
        forwarded = {**scope, "path": path, "raw_path": path.encode()}
        is_body_sent = False

        async def receive_again() -> Message:
            nonlocal is_body_sent
            if is_body_sent:
                return await receive()
            is_body_sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}

        await self._request.app.router(forwarded, receive_again, send)
