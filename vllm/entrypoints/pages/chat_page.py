"""Serve GET /chat.json: facts about the server for the chat page.

The page calls the API as any client does; conversations are stored only in the browser.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.engine.input.pooling_input import refuse_generation
from vllm.entrypoints.pages.server_state import describe_server, fresh_json
from vllm.entrypoints.shared.context import ServerContext, get_context
from vllm.entrypoints.shared.media import chat_modalities
from vllm.errors import RequestError
from vllm.sampling_params import Interface, numbers_of

router = APIRouter(include_in_schema=False)


@router.get("/chat.json")
async def chat_info(request: Request) -> Response:
    """Return the facts for the chat page."""
    return fresh_json(describe(get_context(request)))


def describe(context: ServerContext) -> dict[str, Any]:
    """Return the state of the server, and the abilities of its model after it is ready."""
    server = describe_server(context) | {
        "has_status_page": context.args.status_page,
        "has_docs": not context.args.disable_fastapi_docs,
    }
    return server | _describe_model(context) if server["state"] == "ready" else server


def _describe_model(context: ServerContext) -> dict[str, Any]:
    config, args, engine = context.config, context.args, context.engine
    own_template = getattr(engine.tokenizer, "chat_template", None)
    return {
        "refusal": _refusal(context),
        "has_chat_template": bool(args.chat_template or own_template),
        "has_auto_tool_choice": args.enable_auto_tool_choice,
        "modalities": chat_modalities(engine.input_processor),
        "transcribes": context.speech is not None,
        "max_model_len": config.scheduler.max_model_len,
        "sampling_defaults": _sampling_defaults(engine.generation_defaults),
    }


def _refusal(context: ServerContext) -> str | None:
    """Return why this model cannot chat, and what it can do instead; None if it can chat."""
    try:
        refuse_generation(context.config.model.pooler)
    except RequestError as error:
        return str(error)
    if context.engine.tokenizer is None:
        return "this server runs without a tokenizer (skip_tokenizer_init): it takes token ids only"
    return None


def _sampling_defaults(of_model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default sampling parameters that the chat page shows."""
    shown = numbers_of(Interface.API | Interface.PAGE)
    return {name: of_model.get(name, number.default) for name, number in shown.items()}
