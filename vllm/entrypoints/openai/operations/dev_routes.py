"""Routes for development, served with VLLM_SERVER_DEV_MODE=1 alone."""

import dataclasses
import json

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from vllm.entrypoints.openai.context import get_context
from vllm.entrypoints.openai.errors import ErrorInfo

router = APIRouter(tags=["development"])

_NO_SLEEP = ErrorInfo(501, "Not Implemented", "this engine has no sleep mode")


@router.get("/server_info")
async def server_info(request: Request) -> JSONResponse:
    """What the server and its engine run with."""
    context = get_context(request)
    args = dataclasses.asdict(context.args) | {"api_key": "***" if context.args.api_key else None}
    config = None
    if context.engine.startup.is_ready:
        config = dataclasses.asdict(context.config)
    body = json.loads(json.dumps({"server": args, "vllm_config": config}, default=str))
    return JSONResponse(body)


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Forget what the KV cache holds for prompts to come; 409 while requests use it."""
    done = await get_context(request).engine.reset_prefix_cache()
    if done:
        return Response(status_code=200)
    info = ErrorInfo(409, "Conflict", "requests are using the prefix cache: try again later")
    return JSONResponse(info.body(), status_code=info.status)


@router.post("/sleep")
async def sleep() -> JSONResponse:
    """Refused: there is no sleep mode."""
    return JSONResponse(_NO_SLEEP.body(), status_code=_NO_SLEEP.status)


@router.post("/wake_up")
async def wake_up() -> JSONResponse:
    """Refused: there is no sleep mode."""
    return JSONResponse(_NO_SLEEP.body(), status_code=_NO_SLEEP.status)


@router.get("/is_sleeping")
async def is_sleeping() -> JSONResponse:
    """Never."""
    return JSONResponse({"is_sleeping": False})
