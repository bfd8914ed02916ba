"""Serve routes for traces of torch's profiler, if VLLM_TORCH_PROFILER_DIR is set."""

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from vllm.entrypoints.shared.context import get_context

router = APIRouter(tags=["development"])


@router.post("/start_profile")
async def start_profile(request: Request) -> Response:
    """Start a profiler trace of the workers."""
    await get_context(request).engine.start_profile()
    return Response(status_code=200)


@router.post("/stop_profile")
async def stop_profile(request: Request) -> Response:
    """Stop the profiler trace and write its file. If replicas have no trace, the body names
    them.
    """
    missing = await get_context(request).engine.stop_profile()
    return JSONResponse({"message": ". ".join(missing)}) if missing else Response(status_code=200)
