"""Serve routes for development, only with VLLM_SERVER_DEV_MODE=1; and routes for traces of torch's
profiler, if VLLM_TORCH_PROFILER_DIR is set.

Some of them manage the replicas of --data-parallel-size:

GET  /replicas              what each replica does
POST /replicas/1/drain      send no more requests to replica 1; answers when it has none
POST /replicas/1/resume     send requests to it again
POST /replicas/1/restart    drain it and replace its process, while the others serve
"""

import dataclasses
import json
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from vllm.entrypoints.http.errors import ErrorInfo
from vllm.entrypoints.openai.protocol.base import RequestBody
from vllm.entrypoints.shared.context import get_context

router = APIRouter(tags=["development"])
profile_router = APIRouter(tags=["development"])

Tags = Annotated[list[str] | None, Query(description="weights, kv_cache or both")]
Timeout = Annotated[
    float | None,
    Query(
        gt=0,
        description=(
            "seconds to wait for its requests to finish; after that they fail with an error"
        ),
    ),
]


class WorkerCall(RequestBody):
    """A method of the workers, and its arguments."""

    method: str
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)
    timeout: float | None = Field(default=None, gt=0)
    """Seconds to wait for the results."""


@router.get("/server_info")
async def server_info(request: Request) -> JSONResponse:
    """Return the settings of the server and its engine."""
    context = get_context(request)
    args = dataclasses.asdict(context.args) | {"api_key": "***" if context.args.api_key else None}
    config = None
    if context.engine.startup.is_ready:
        config = dataclasses.asdict(context.config)
    body = json.loads(json.dumps({"server": args, "vllm_config": config}, default=str))
    return JSONResponse(body)


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Empty the prefix cache. Answers 409 while requests use it."""
    done = await get_context(request).engine.reset_prefix_cache()
    if done:
        return Response(status_code=200)
    info = ErrorInfo(409, "requests are using the prefix cache: try again later")
    return JSONResponse(info.body(), status_code=info.status)


@router.post("/reset_mm_cache")
async def reset_mm_cache(request: Request) -> Response:
    """Drop the cached images, and the embeddings that no running request reads."""
    await get_context(request).engine.reset_mm_cache()
    return Response(status_code=200)


@router.post("/collective_rpc")
async def collective_rpc(request: Request, call: WorkerCall) -> Response:
    """Call a method of all workers by its name. Returns one result per worker.

    Every method of the workers can be called, so only trusted users may reach this route.
    """
    results = await get_context(request).engine.collective_rpc(
        call.method, call.timeout, call.args, call.kwargs
    )
    # Msgspec encodes bytes as base64 and NaN as null.
    body = msgspec.json.encode({"results": results})
    return Response(body, media_type="application/json")


@router.post("/sleep")
async def sleep(request: Request, level: int = 1) -> Response:
    """Release the memory of weights and KV cache. Answers 409 while requests run."""
    await get_context(request).engine.sleep(level)
    return Response(status_code=200)


@router.post("/wake_up")
async def wake_up(request: Request, tags: Tags = None) -> Response:
    """Allocate the memory again: of all parts, or of the parts in `tags`."""
    await get_context(request).engine.wake_up(tags)
    return Response(status_code=200)


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> JSONResponse:
    """Return whether the memory of weights or KV cache is released."""
    return JSONResponse({"is_sleeping": await get_context(request).engine.is_sleeping()})


@router.get("/replicas")
async def replicas(request: Request) -> JSONResponse:
    """Return the state, process id, requests, tokens to compute and restarts of each replica."""
    states = get_context(request).engine.replica_states()
    return JSONResponse({"replicas": [state._asdict() for state in states]})


@router.post("/replicas/{replica}/drain")
async def drain(request: Request, replica: int) -> Response:
    """Stop sending requests to a replica. Answers when it has none."""
    await get_context(request).engine.drain_replica(replica)
    return Response(status_code=200)


@router.post("/replicas/{replica}/resume")
async def resume(request: Request, replica: int) -> Response:
    """Send requests to a drained replica again."""
    await get_context(request).engine.resume_replica(replica)
    return Response(status_code=200)


@router.post("/replicas/{replica}/restart")
async def restart(request: Request, replica: int, timeout: Timeout = None) -> Response:
    """Drain a replica and replace its process. Answers when it serves again."""
    await get_context(request).engine.restart_replica(replica, timeout)
    return Response(status_code=200)


@profile_router.post("/start_profile")
async def start_profile(request: Request) -> Response:
    """Start a profiler trace of the workers."""
    await get_context(request).engine.start_profile()
    return Response(status_code=200)


@profile_router.post("/stop_profile")
async def stop_profile(request: Request) -> Response:
    """Stop the profiler trace and write its file. If replicas have no trace, the body names
    them.
    """
    missing = await get_context(request).engine.stop_profile()
    return JSONResponse({"message": ". ".join(missing)}) if missing else Response(status_code=200)
