"""Serve POST /classify."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.engine.input.pooling_input import require_task
from vllm.entrypoints.http.body_route import BodyRoute
from vllm.entrypoints.openai.pooling.embedding import prompts_of
from vllm.entrypoints.openai.pooling.run import (
    Pooled,
    list_response,
    pool,
    pooler_of,
    response_id,
)
from vllm.entrypoints.openai.protocol.base import error_responses
from vllm.entrypoints.openai.protocol.pooling import ClassificationRequest, ClassificationResponse
from vllm.entrypoints.shared.context import get_context

router = APIRouter(route_class=BodyRoute)


@router.post("/classify", response_model=ClassificationResponse, responses=error_responses(400))
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
