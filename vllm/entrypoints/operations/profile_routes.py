"""Routes for traces of torch's profiler, served if VLLM_TORCH_PROFILER_DIR is set."""

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from vllm.entrypoints.shared.context import get_context

router = APIRouter(tags=["development"])


@router.post("/start_profile")
async def start_profile(request: Request) -> Response:
    """Begin a trace of what the workers compute."""
    await get_context(request).engine.start_profile()
    return Response(status_code=200)


@router.post("/stop_profile")
async def stop_profile(request: Request) -> Response:
    """End the trace and write its file. A body tells which replicas have none."""
    missing = await get_context(request).engine.stop_profile()
    return JSONResponse({"message": ". ".join(missing)}) if missing else Response(status_code=200)
