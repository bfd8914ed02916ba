"""/v1/audio/*: refused, because this server runs no audio models."""

from fastapi import APIRouter
from starlette.responses import Response

from vllm.errors import NotFoundError

router = APIRouter(tags=["audio"])


@router.post("/v1/audio/transcriptions", status_code=404)
@router.post("/v1/audio/translations", status_code=404)
@router.post("/v1/audio/speech", status_code=404)
async def refuse_audio() -> Response:
    """Not available: models of this server read and write text."""
    raise NotFoundError("audio is not available: this server runs text models only")
