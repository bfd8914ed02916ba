"""Serve routes that add and remove LoRA adapters, only with VLLM_ALLOW_RUNTIME_LORA_UPDATING."""

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from vllm.entrypoints.http.body_route import BodyRoute
from vllm.entrypoints.openai.protocol.base import (
    LoadLoRAAdapterRequest,
    UnloadLoRAAdapterRequest,
    error_responses,
)
from vllm.entrypoints.shared.context import ServerContext, get_context
from vllm.entrypoints.shared.served_adapters import ServedAdapters
from vllm.errors import RequestError

if TYPE_CHECKING:
    from vllm.engine.async_llm_engine import AsyncLLM

router = APIRouter(route_class=BodyRoute)


def _updatable(request: Request) -> tuple[ServedAdapters, "AsyncLLM"]:
    context: ServerContext = get_context(request)
    if context.adapters is None:
        raise RequestError("LoRA is off. Start the server with --enable-lora")
    return context.adapters, context.engine


@router.post("/v1/load_lora_adapter", responses=error_responses(400, 404))
async def load_lora_adapter(body: LoadLoRAAdapterRequest, request: Request) -> PlainTextResponse:
    """Load a LoRA adapter and serve it under a name. With load_inplace it may replace an adapter of
    this name, which keeps serving if the new one cannot be loaded.
    """
    adapters, engine = _updatable(request)
    await adapters.fetch(body.lora_path)
    adapter = adapters.check(body.lora_name, body.lora_path, replaces=body.load_inplace)
    await engine.add_lora(adapter)
    adapters.offer(adapter)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", responses=error_responses(400, 404))
async def unload_lora_adapter(
    body: UnloadLoRAAdapterRequest, request: Request
) -> PlainTextResponse:
    """Stop serving a LoRA adapter, and drop it from memory. Running requests keep it."""
    adapters, engine = _updatable(request)
    await engine.remove_lora(adapters.remove(body.lora_name).lora_int_id)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
