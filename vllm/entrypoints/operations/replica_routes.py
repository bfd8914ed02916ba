"""Serve routes that manage the replicas of --data-parallel-size, only with VLLM_SERVER_DEV_MODE=1.

GET  /replicas              what each replica does
POST /replicas/1/drain      send no more requests to replica 1; answers when it has none
POST /replicas/1/resume     send requests to it again
POST /replicas/1/restart    drain it and replace its process, while the others serve
"""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from vllm.entrypoints.shared.context import get_context

router = APIRouter(tags=["development"])

Timeout = Annotated[
    float | None,
    Query(
        gt=0,
        description=(
            "seconds to wait for its requests to finish; after that they fail with an error"
        ),
    ),
]


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
