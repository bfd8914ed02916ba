"""Serve POST /v1/embeddings, POST /pooling and POST /classify."""

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.engine.input.pooling_input import require_task
from vllm.entrypoints.http.body_route import BodyRoute
from vllm.entrypoints.http.sse import run_until_disconnect
from vllm.entrypoints.openai.chat.prompt import chat_prompt
from vllm.entrypoints.openai.pooling.run import (
    Pooled,
    list_response,
    pool,
    pooler_of,
    response_id,
)
from vllm.entrypoints.openai.protocol.base import error_responses
from vllm.entrypoints.openai.protocol.chat import ChatFields, TemplateFields
from vllm.entrypoints.openai.protocol.pooling import (
    ClassificationRequest,
    ClassificationResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingResponse,
)
from vllm.entrypoints.shared.context import ServerContext, get_context
from vllm.errors import RequestError
from vllm.inputs import PromptType
from vllm.messages import FloatArray

router = APIRouter(route_class=BodyRoute)
_ERRORS = error_responses(400)


@router.post("/v1/embeddings", response_model=EmbeddingResponse, responses=_ERRORS)
async def create_embedding(body: EmbeddingRequest, request: Request) -> Response:
    """Return an embedding vector for each input, or for a conversation."""
    context = get_context(request)
    model = context.check_model(body.model)
    require_task(pooler_of(context), "embed")
    return await _respond(context, request, body, model, "embedding", "embd")


@router.post("/pooling", response_model=PoolingResponse, responses=_ERRORS)
async def create_pooling(body: EmbeddingRequest, request: Request) -> Response:
    """Return the pooled result of each input, for any pooling task: a vector, probabilities, or
    rewards per token.
    """
    context = get_context(request)
    model = context.check_model(body.model)
    require_task(pooler_of(context))
    return await _respond(context, request, body, model, "data", "pool")


@router.post("/classify", response_model=ClassificationResponse, responses=_ERRORS)
async def classify(body: ClassificationRequest, request: Request) -> Response:
    """Return a probability per label, and the most likely label, for each input."""
    context = get_context(request)
    model = context.check_model(body.model)
    pooler = require_task(pooler_of(context), "classify", "score")
    own_id = response_id(request, "classify")
    prompts = prompts_of(body.input)
    outputs = await pool(context, request, body, prompts, own_id)

    def describe(index: int, output: Pooled) -> dict[str, Any]:
        probs = output.outputs.data.tolist()
        label = pooler.labels[probs.index(max(probs))]
        return {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}

    return await list_response(
        context, own_id, model, lambda: list(map(describe, range(len(outputs)), outputs)), outputs
    )


async def _respond(
    context: ServerContext,
    request: Request,
    body: EmbeddingRequest,
    model: str,
    key: str,
    prefix: str,
) -> Response:
    """Run the request, and return the response with the results under the field `key`."""
    own_id = response_id(request, prefix)
    is_normalized = _is_normalized(context, body)
    prompts = await run_until_disconnect(request, _prompts(context, body))
    outputs = await pool(context, request, body, prompts, own_id, dimensions=body.dimensions)
    is_base64 = body.encoding_format == "base64"
    kind = "embedding" if key == "embedding" else "pooling"

    def make_data() -> list[dict[str, Any]]:
        return [
            {
                "index": index,
                "object": kind,
                key: _numbers(output.outputs.data, is_base64, is_normalized),
            }
            for index, output in enumerate(outputs)
        ]

    return await list_response(context, own_id, model, make_data, outputs)


def _is_normalized(context: ServerContext, body: EmbeddingRequest) -> bool:
    """Return whether the server has to scale the vectors of a request to length 1, because the
    model does not.

    Raises:
        RequestError: the request wants vectors of another length, and the model has no such.
    """
    pooler = require_task(pooler_of(context))
    if body.normalize is None or pooler.task != "embed":
        return False
    is_done = pooler.activation == "normalize"
    if is_done and not body.normalize:
        raise RequestError(
            "normalize must be true or left out, because all embeddings of this server have "
            "length 1. The flag --override-pooler-config '{\"normalize\": false}' changes that",
            param="normalize",
        )
    return body.normalize and not is_done


def _numbers(data: FloatArray, is_base64: bool, is_normalized: bool) -> Any:
    if is_normalized:
        data = data / max(float(np.linalg.norm(data)), 1e-12)
    if is_base64:
        return base64.b64encode(np.ascontiguousarray(data, "<f4").tobytes()).decode()
    return data.tolist()


async def _prompts(context: ServerContext, body: EmbeddingRequest) -> list[PromptType]:
    if body.input is None:
        is_truncated = body.truncate_prompt_tokens is not None
        prompt = await chat_prompt(
            context,
            _conversation(body),
            with_tools=False,
            max_tokens=None if is_truncated else context.config.scheduler.max_model_len,
        )
        if "media" in prompt:
            raise RequestError(
                "messages: a pooling model reads text only, so media are not accepted. Send text",
                param="messages",
            )
        return [prompt]
    prompts = prompts_of(body.input)
    if body.add_special_tokens is False:
        return [
            {"prompt": prompt, "add_special_tokens": False} if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]
    return prompts


def prompts_of(given: Any) -> list[PromptType]:
    """Return the prompts of an `input`: one or several texts, or token ids of one or several.

    Raises:
        RequestError: `given` is empty.
    """
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):
        return [given]
    if not given:
        raise RequestError("input is empty: send at least one entry", param="input")
    return list(given)


def _conversation(body: EmbeddingRequest) -> ChatFields:
    return ChatFields(
        messages=body.messages or [],
        add_special_tokens=bool(body.add_special_tokens),
        **{name: getattr(body, name) for name in TemplateFields.model_fields},
    )
