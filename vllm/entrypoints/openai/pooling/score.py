"""Serve POST /score and POST /rerank, under all of their names."""

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.engine.input.input_processor import LONG_TEXT_CHARS, InputProcessor
from vllm.engine.input.pooling_input import require_scores
from vllm.entrypoints.http.body_route import BodyRoute
from vllm.entrypoints.http.sse import run_until_disconnect
from vllm.entrypoints.openai.pooling.run import (
    Pooled,
    list_response,
    pool,
    pooler_of,
    response_id,
    usage_of,
)
from vllm.entrypoints.openai.protocol.base import error_responses
from vllm.entrypoints.openai.protocol.pooling import (
    PoolingFields,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from vllm.entrypoints.openai.shared.chunks import json_response
from vllm.entrypoints.shared.context import ServerContext, get_context
from vllm.entrypoints.shared.scoring import cosine, pair_up
from vllm.inputs import PromptType

router = APIRouter(route_class=BodyRoute)
_ERRORS = error_responses(400)


@router.post("/score", response_model=ScoreResponse, responses=_ERRORS)
@router.post("/v1/score", response_model=ScoreResponse, responses=_ERRORS)
async def score(body: ScoreRequest, request: Request) -> Response:
    """Score pairs of texts: one text with each of several, or pair by pair."""
    context = get_context(request)
    model = context.check_model(body.model)
    own_id = response_id(request, "score")
    first, second = pair_up(body.text_1, body.text_2)
    scores, outputs = await _score(context, request, body, first, second, own_id)
    data = [
        {"index": index, "object": "score", "score": value} for index, value in enumerate(scores)
    ]
    return await list_response(context, own_id, model, lambda: data, outputs)


@router.post("/rerank", response_model=RerankResponse, responses=_ERRORS)
@router.post("/v1/rerank", response_model=RerankResponse, responses=_ERRORS)
@router.post("/v2/rerank", response_model=RerankResponse, responses=_ERRORS)
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Sort documents by how well they answer a query, best first."""
    context = get_context(request)
    model = context.check_model(body.model)
    own_id = response_id(request, "rerank")
    first, second = pair_up(body.query, body.documents)
    scores, outputs = await _score(context, request, body, first, second, own_id)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    has_documents = body.return_documents is not False
    return json_response(
        {
            "id": own_id,
            "model": model,
            "usage": {"total_tokens": usage_of(context, outputs)["total_tokens"]},
            "results": [
                {
                    "index": index,
                    **({"document": {"text": second[index]}} if has_documents else {}),
                    "relevance_score": scores[index],
                }
                for index in order[: body.top_n or None]
            ],
        }
    )


async def _score(
    context: ServerContext,
    request: Request,
    body: PoolingFields,
    first: Sequence[str],
    second: Sequence[str],
    own_id: str,
) -> tuple[list[float], list[Pooled]]:
    """Return a score per pair of texts, and the engine's outputs."""
    pooler = require_scores(pooler_of(context))
    if pooler.task == "embed":
        texts: list[PromptType] = list(dict.fromkeys([*first, *second]))  # each distinct text once
        outputs = await pool(context, request, body, texts, own_id)
        vectors = {text: out.outputs.data for text, out in zip(texts, outputs, strict=True)}
        pairs = zip(first, second, strict=True)
        return [cosine(vectors[a], vectors[b]) for a, b in pairs], outputs
    prompts = await run_until_disconnect(
        request, _pairs(context, first, second, body.truncate_prompt_tokens)
    )
    outputs = await pool(context, request, body, prompts, own_id, is_truncated=True)
    return [float(output.outputs.data[0]) for output in outputs], outputs


async def _pairs(
    context: ServerContext, first: Sequence[str], second: Sequence[str], truncate: int | None
) -> list[PromptType]:
    """Return each pair of texts as one prompt."""

    is_long = sum(map(len, first)) + sum(map(len, second)) > LONG_TEXT_CHARS
    prompts: list[PromptType] = []
    for pair in zip(first, second, strict=True):
        tokenize = partial(_tokenize_pair, *pair, truncate)
        if is_long:
            prompts.append(await context.engine.run_in_background(tokenize, sum(map(len, pair))))
        else:
            prompts.append(tokenize(context.engine.input_processor))
    return prompts


def _tokenize_pair(
    text: str, other: str, truncate: int | None, processor: InputProcessor
) -> PromptType:
    return processor.pooling.tokenize_pair(text, other, truncate)
