"""Serve GET /v1/models: the names that requests may use as `model`.

Clients of Anthropic's API send the header anthropic-version, and get the answer in its format.
"""

from dataclasses import dataclass
from datetime import datetime, timezone

from fastapi import APIRouter, Request

from vllm.entrypoints.openai.protocol.base import (
    AnthropicModel,
    AnthropicModelList,
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
async def list_models(request: Request) -> ModelList | AnthropicModelList:
    """List all names under which the model and its adapters are served."""
    context = get_context(request)
    adapters = [] if context.adapters is None else context.adapters.all
    names = [*context.model_names, *(adapter.lora_name for adapter in adapters)]
    if _is_for_anthropic(request):
        data = [_anthropic_card(context, name) for name in names]
        return AnthropicModelList(data=data, first_id=names[0], last_id=names[-1])
    return ModelList(data=[_card(context, _path(context, name)) for name in names])


@router.get("/v1/models/{model:path}", responses=error_responses(404))
async def show_model(model: str, request: Request) -> ModelCard | AnthropicModel:
    """Show one of the served names."""
    context = get_context(request)
    name = context.check_model(model)
    if _is_for_anthropic(request):
        return _anthropic_card(context, name)
    return _card(context, _path(context, name))


def _is_for_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _anthropic_card(context: ServerContext, name: str) -> AnthropicModel:
    most = context.config.scheduler.max_model_len
    created = datetime.fromtimestamp(int(context.created), timezone.utc)
    return AnthropicModel(
        id=name,
        display_name=name,
        created_at=created.isoformat().replace("+00:00", "Z"),
        max_input_tokens=most,
        max_tokens=most,
    )


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
