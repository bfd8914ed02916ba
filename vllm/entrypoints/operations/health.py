"""Serve probes, the version and the load of the server. None of these routes needs a model.

/livez     200 as long as the process answers
/startupz  200 once the engine has been ready; 503 with phase and progress before
/readyz    200 while new requests are taken: not during start or shutdown, nor after a failure, nor
           while the engine sleeps or all of its replicas are being drained
/health    200 while the engine runs: as /readyz, but also while it sleeps or is drained, as it need
           not be started again then. No body
/ping      as /health, for SageMaker
"""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from vllm.entrypoints.shared.context import ServerContext, get_context
from vllm.messages import WarmUpStats
from vllm.version import __version__

router = APIRouter(tags=["health"])


@router.get("/livez")
async def livez() -> JSONResponse:
    """Answer 200: the process is alive."""
    return JSONResponse({"status": "alive"})


@router.get("/startupz")
async def startupz(request: Request) -> JSONResponse:
    """Return whether the start has finished, and its progress."""
    context = get_context(request)
    return _describe(context, 200 if _has_started(context) else 503)


@router.get("/readyz")
async def readyz(request: Request) -> JSONResponse:
    """Return whether new requests are accepted, and the reason if not."""
    context = get_context(request)
    return _describe(context, 200 if context.state == "ready" else 503)


@router.get("/health", response_class=Response)
async def health(request: Request) -> Response:
    """Return whether the engine runs, as a status without a body."""
    is_running = get_context(request).state in ("ready", "paused")
    return Response(status_code=200 if is_running else 503)


@router.get("/ping", operation_id="ping", response_class=Response)
@router.post("/ping", operation_id="ping_post", response_class=Response)
async def ping(request: Request) -> Response:
    """Return the same as /health."""
    return await health(request)


@router.get("/version")
async def version() -> JSONResponse:
    """Return the version of this package."""
    return JSONResponse({"version": __version__})


@router.get("/load")
async def load(request: Request) -> JSONResponse:
    """Return the number of requests in progress."""
    return JSONResponse({"server_load": get_context(request).num_in_progress})


def describe_warm_up(warm_up: WarmUpStats) -> dict[str, Any] | None:
    """Return the progress of a warm-up that runs while the server serves; None if all buckets were
    warm before the first request.
    """
    if not warm_up.num_wanted:
        return None
    seconds, share = warm_up.seconds_left, warm_up.padded_share
    return {
        "is_warming": warm_up.is_warming,
        "warm_buckets": warm_up.num_warm,
        "wanted_buckets": warm_up.num_wanted,
        "seconds_left": None if seconds is None else round(seconds, 1),
        "padded_share": None if share is None else round(share, 4),
        "longest_delay_s": round(warm_up.longest_delay_s, 3),
    }


def _has_started(context: ServerContext) -> bool:
    was_ready = context.has_been_ready or context.engine.startup.is_ready
    return was_ready and not _is_dead(context)


def _is_dead(context: ServerContext) -> bool:
    return context.engine.startup.error is not None


def _describe(context: ServerContext, status_code: int) -> JSONResponse:
    startup = context.engine.startup
    body: dict[str, Any] = {"status": context.state, "phase": startup.phase}
    if context.state == "paused":
        body["message"] = context.engine.refusal
    if startup.is_ready and context.engine.metrics is not None:
        warm_up = describe_warm_up(context.engine.metrics.totals.warm_up)
        body |= {} if warm_up is None else {"warm_up": warm_up}
    if not startup.is_ready and not _is_dead(context):
        body |= {"done": startup.done, "total": startup.total}
        body["eta_seconds"] = startup.eta_seconds
    return JSONResponse(body, status_code=status_code)
