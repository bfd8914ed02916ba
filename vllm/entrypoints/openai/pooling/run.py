"""Run the prompts of one request in a pooling engine."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from vllm.config import PoolerConfig
from vllm.entrypoints.http import off_loop
from vllm.entrypoints.http.errors import GenerationError
from vllm.entrypoints.http.sse import run_until_disconnect
from vllm.entrypoints.openai.protocol.base import now, random_id, usage_dict
from vllm.entrypoints.openai.protocol.pooling import PoolingFields
from vllm.entrypoints.openai.shared.chunks import json_response
from vllm.entrypoints.openai.shared.prompts import (
    engine_key,
    max_running,
    request_id_of,
    trace_headers_of,
)
from vllm.entrypoints.shared.context import ServerContext
from vllm.errors import RequestError
from vllm.inputs import PromptType
from vllm.outputs import PoolingOutput, PoolingRequestOutput
from vllm.pooling_params import PoolingParams
from vllm.utils.futures import end_tasks

Pooled = PoolingRequestOutput[PoolingOutput]

_MANY_NUMBERS = 32 * 1024
"""With this many elements or more, they are encoded in a thread."""


def pooler_of(context: ServerContext) -> PoolerConfig | None:
    """Return the pooler config of the served model; None if it generates text."""
    return context.config.model.pooler


def response_id(request: Request, prefix: str) -> str:
    """Return the id of the response to a request. Its end may be chosen by the client."""
    return f"{prefix}-{request_id_of(request, random_id())}"


async def pool(
    context: ServerContext,
    request: Request,
    body: PoolingFields,
    prompts: Sequence[PromptType],
    own_id: str,
    *,
    dimensions: int | None = None,
    is_truncated: bool = False,
) -> list[Pooled]:
    """Run all prompts, and return their results in order. If one fails, or the client disconnects,
    all are aborted.

    Args:
        context: context of the server; its engine is ready.
        request: HTTP request of the client.
        body: body of the request.
        prompts: prompts of any type.
        own_id: id of the response; the ids in the engine begin with it.
        dimensions: length of the vectors; see `PoolingParams`.
        is_truncated: the prompts are already truncated.

    Raises:
        RequestError: a prompt is not valid; names it, if there are several.
        GenerationError: a prompt has no result.
    """
    truncate = None if is_truncated else body.truncate_prompt_tokens
    params = PoolingParams(dimensions=dimensions, truncate_prompt_tokens=truncate)
    trace_headers = trace_headers_of(request)
    core_id = engine_key(own_id)

    async def run_one(index: int, prompt: PromptType) -> Pooled:
        results = context.engine.encode(
            prompt,
            params,
            f"{core_id}-{index}",
            trace_headers=trace_headers,
            priority=body.priority,
        )
        try:
            async for output in results:
                if output.error is not None:
                    raise GenerationError(_named(output.error, index, len(prompts)))
                return output
            raise GenerationError(_named("no result", index, len(prompts)))
        except RequestError as error:
            error.args = (_named(str(error), index, len(prompts)),)
            raise
        finally:
            await results.aclose()

    turns = asyncio.Semaphore(max_running(context))

    async def run_in_turn(index: int, prompt: PromptType) -> Pooled:
        async with turns:
            return await run_one(index, prompt)

    return await run_until_disconnect(request, _all(run_in_turn, prompts))


async def _all(
    run_one: Callable[[int, PromptType], Coroutine[Any, Any, Pooled]], prompts: Sequence[PromptType]
) -> list[Pooled]:
    """Run all prompts like `asyncio.gather`, but cancel all tasks after a failure or a
    cancellation.

    Each prompt is tokenised when its task begins; other tasks may run meanwhile.
    """
    tasks: list[asyncio.Task[Pooled]] = []
    try:
        for index, prompt in enumerate(prompts):
            tasks.append(asyncio.ensure_future(run_one(index, prompt)))
            await asyncio.sleep(0)
        return await asyncio.gather(*tasks)
    finally:
        await end_tasks(tasks)


def usage_of(context: ServerContext, outputs: Sequence[Pooled]) -> dict[str, Any]:
    """Return the usage over all prompts, with 0 completion tokens."""
    cached = None
    if context.args.enable_prompt_tokens_details:
        cached = sum(output.num_cached_tokens for output in outputs)
    return usage_dict(sum(len(output.prompt_token_ids) for output in outputs), 0, cached)


async def list_response(
    context: ServerContext,
    own_id: str,
    model: str,
    make_data: Callable[[], list[dict[str, Any]]],
    outputs: Sequence[Pooled],
) -> Response:
    """Return a `ListResponse` with the usage, and with data created from `outputs`, in a thread if
    that takes long.
    """
    head = {"id": own_id, "object": "list", "created": now(), "model": model}

    def write() -> Response:
        return json_response({**head, "data": make_data(), "usage": usage_of(context, outputs)})

    num_numbers = sum(output.outputs.data.size for output in outputs)
    return await off_loop.run(write, is_large=num_numbers >= _MANY_NUMBERS)


def _named(message: str, index: int, count: int) -> str:
    return f"prompt {index} of {count}: {message}" if count > 1 else message
