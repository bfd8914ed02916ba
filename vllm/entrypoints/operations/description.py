"""Serve GET /openapi.json: the description of the server's routes, for programs and for the page
/docs.

Creating it takes half a second, so it is done in a thread at the first request; FastAPI would do it
in the event loop.
"""

import asyncio
import threading
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import JSONResponse

from vllm.utils.background_work import run_in_time_slices

router = APIRouter()

_lock = threading.Lock()
"""Lock of the description: others wait while one thread makes it."""


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> JSONResponse:
    """Return the OpenAPI description of all routes."""
    description = await asyncio.to_thread(run_in_time_slices, partial(_describe, request.app))
    root_path = request.scope.get("root_path", "").rstrip("/")
    if root_path:
        description = {**description, "servers": [{"url": root_path}]}
    return JSONResponse(description)


def _describe(app: FastAPI) -> dict[str, Any]:
    with _lock:
        return app.openapi()  # FastAPI caches the description
