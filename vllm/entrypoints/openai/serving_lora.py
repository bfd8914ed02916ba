"""Routes that add and remove LoRA adapters of a server."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import PlainTextResponse

from vllm import envs
from vllm.entrypoints.openai.protocol.base import (
    LoadLoRAAdapterRequest,
    UnloadLoRAAdapterRequest,
    error_responses,
)
from vllm.entrypoints.server.context import ServerContext, get_context
from vllm.entrypoints.server.served_adapters import ServedAdapters
from vllm.errors import NotFoundError, RequestError

router = APIRouter()


def _updatable(request: Request) -> ServedAdapters:
    context: ServerContext = get_context(request)
    if not envs.get().VLLM_ALLOW_RUNTIME_LORA_UPDATING:
        raise NotFoundError(
            "Adapters cannot be added or removed while this server runs. Start it with "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 to allow that to everyone who can reach it"
        )
    if context.adapters is None:
        raise RequestError("LoRA is off. Start the server with --enable-lora")
    return context.adapters


@router.post(
    "/v1/load_lora_adapter", responses=error_responses(400, 404), response_class=PlainTextResponse
)
async def load_lora_adapter(
    body: LoadLoRAAdapterRequest, adapters: Annotated[ServedAdapters, Depends(_updatable)]
) -> str:
    """Offer a LoRA adapter in a folder of the server under a name."""
    adapters.add(body.lora_name, body.lora_path)
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


@router.post(
    "/v1/unload_lora_adapter", responses=error_responses(400, 404), response_class=PlainTextResponse
)
async def unload_lora_adapter(
    body: UnloadLoRAAdapterRequest, adapters: Annotated[ServedAdapters, Depends(_updatable)]
) -> str:
    """Offer a LoRA adapter no longer. Requests that run keep it."""
    adapters.remove(body.lora_name)
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."
