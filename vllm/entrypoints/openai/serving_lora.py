"""Routes that add and remove LoRA adapters of a server; only with
VLLM_ALLOW_RUNTIME_LORA_UPDATING."""

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from vllm.entrypoints.http.body_route import BodyRoute
from vllm.entrypoints.openai.protocol.base import (
    LoadLoRAAdapterRequest,
    UnloadLoRAAdapterRequest,
    error_responses,
)
from vllm.entrypoints.server.context import ServerContext, get_context
from vllm.entrypoints.server.served_adapters import ServedAdapters
from vllm.errors import RequestError

router = APIRouter(route_class=BodyRoute)


def _updatable(request: Request) -> ServedAdapters:
    context: ServerContext = get_context(request)
    if context.adapters is None:
        raise RequestError("LoRA is off. Start the server with --enable-lora")
    return context.adapters


@router.post("/v1/load_lora_adapter", responses=error_responses(400, 404))
async def load_lora_adapter(body: LoadLoRAAdapterRequest, request: Request) -> PlainTextResponse:
    """Offer a LoRA adapter in a folder of the server under a name."""
    _updatable(request).add(body.lora_name, body.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", responses=error_responses(400, 404))
async def unload_lora_adapter(
    body: UnloadLoRAAdapterRequest, request: Request
) -> PlainTextResponse:
    """Offer a LoRA adapter no longer. Requests that run keep it."""
    _updatable(request).remove(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
