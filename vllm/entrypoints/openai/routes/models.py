"""Serve GET /v1/models: the names that requests may use as `model`."""

from dataclasses import dataclass

from fastapi import APIRouter, Request

from vllm.entrypoints.openai.protocol.base import (
    ModelCard,
    ModelList,
    ModelPermission,
    error_responses,
)
from vllm.entrypoints.shared.context import ServerContext, get_context

router = APIRouter()


@dataclass(frozen=True)
class BaseModelPath:
    """A name under which a model is served, and the folder or Hugging Face name of its files."""

    name: str
    model_path: str


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """List all names under which the model and its adapters are served."""
    context = get_context(request)
    adapters = [] if context.adapters is None else context.adapters.all
    names = [*context.model_names, *(adapter.lora_name for adapter in adapters)]
    return ModelList(data=[_card(context, _path(context, name)) for name in names])


@router.get("/v1/models/{model:path}", responses=error_responses(404))
async def show_model(model: str, request: Request) -> ModelCard:
    """Show one of the served names."""
    context = get_context(request)
    return _card(context, _path(context, context.check_model(model)))


def _path(context: ServerContext, name: str) -> BaseModelPath:
    adapter = context.adapter(name)
    return BaseModelPath(name, str(context.config.model.model) if adapter is None else adapter.path)


def _card(context: ServerContext, path: BaseModelPath) -> ModelCard:
    return ModelCard(
        id=path.name,
        created=int(context.created),
        root=path.model_path,
        parent=None if context.adapter(path.name) is None else context.model_names[0],
        max_model_len=context.config.scheduler.max_model_len,
        permission=[ModelPermission(created=int(context.created))],
    )
