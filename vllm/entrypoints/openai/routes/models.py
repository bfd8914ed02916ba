"""GET /v1/models, and the names that requests may give as `model`."""

from dataclasses import dataclass

from fastapi import APIRouter, Request

from vllm.entrypoints.openai.protocol.base import (
    ModelCard,
    ModelList,
    ModelPermission,
    error_responses,
)
from vllm.entrypoints.shared.context import ServerContext, get_context
from vllm.errors import NotFoundError

router = APIRouter()


@dataclass(frozen=True)
class BaseModelPath:
    """A name under which a model is served, and the folder or Hugging Face name of its files."""

    name: str
    model_path: str


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """Every name under which the model is served."""
    context = get_context(request)
    adapters = [] if context.adapters is None else context.adapters.all
    names = [*context.model_names, *(adapter.lora_name for adapter in adapters)]
    return ModelList(data=[_card(context, _path(context, name)) for name in names])


@router.get("/v1/models/{model:path}", responses=error_responses(404))
async def show_model(model: str, request: Request) -> ModelCard:
    """One of the names."""
    context = get_context(request)
    return _card(context, _path(context, check_model(context, model)))


def check_model(context: ServerContext, name: str | None) -> str:
    """Check a model name of a request. Returns the name for the response.

    Args:
        context: of a server whose engine is ready.
        name: as in the request; None or "" is the first name of the server.

    Raises:
        NotFoundError: no model has this name.
    """
    if not name:
        return context.model_names[0]
    if name not in context.model_names and context.adapter(name) is None:
        raise NotFoundError(f"The model `{name:.200}` does not exist.", param="model")
    return name


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
