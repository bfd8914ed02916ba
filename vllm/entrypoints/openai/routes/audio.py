"""/v1/audio/*: refused, because audio models are not supported."""

from fastapi import APIRouter
from starlette.responses import Response

from vllm.errors import NotFoundError

router = APIRouter(tags=["audio"])


@router.post("/v1/audio/transcriptions", status_code=404)
@router.post("/v1/audio/translations", status_code=404)
@router.post("/v1/audio/speech", status_code=404)
async def refuse_audio() -> Response:
    """Refuse: only text models are supported."""
    raise NotFoundError("audio is not available: this server serves text and images, no sound")
