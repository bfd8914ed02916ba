"""Build the application: all routes of the server, and their middleware."""

import time
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware

from vllm import envs
from vllm.engine.async_llm_engine import AsyncLLM
from vllm.entrypoints.anthropic import serving as serving_messages
from vllm.entrypoints.http.asgi import CatchErrors
from vllm.entrypoints.http.errors import add_error_handlers
from vllm.entrypoints.middleware.access_log import AccessLog
from vllm.entrypoints.middleware.auth import Authentication
from vllm.entrypoints.middleware.gate import Gate
from vllm.entrypoints.middleware.limits import BodyLimits, SizeLimit
from vllm.entrypoints.middleware.load import CountRequests
from vllm.entrypoints.middleware.manners import HttpManners
from vllm.entrypoints.middleware.request_id import RequestIds
from vllm.entrypoints.middleware.request_log import RequestLog
from vllm.entrypoints.middleware.user_middleware import add_user_middleware
from vllm.entrypoints.openai.audio import serving as serving_audio
from vllm.entrypoints.openai.chat import serving as serving_chat
from vllm.entrypoints.openai.completion import serving as serving_completion
from vllm.entrypoints.openai.pooling import embedding as serving_embedding
from vllm.entrypoints.openai.pooling import score as serving_score
from vllm.entrypoints.openai.responses import serving as serving_responses
from vllm.entrypoints.openai.routes import (
    adapters as serving_lora,
)
from vllm.entrypoints.openai.routes import (
    invocations as serving_invocations,
)
from vllm.entrypoints.openai.routes import (
    models as serving_models,
)
from vllm.entrypoints.openai.routes import (
    tokenization as serving_tokenization,
)
from vllm.entrypoints.operations import (
    description,
    dev_routes,
    health,
    metrics_route,
)
from vllm.entrypoints.pages.routes import page_routers
from vllm.entrypoints.server.direct_routes import DirectRoutes
from vllm.entrypoints.server.unknown_routes import UnknownRoutes
from vllm.entrypoints.shared.context import ServerContext
from vllm.entrypoints.shared.media import media_rules
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.version import __version__

_MODEL_ROUTES = (
    # Routes are tried in this order, so frequent ones come first.
    serving_chat,
    serving_completion,
    serving_models,
    serving_responses,
    serving_messages,
    serving_tokenization,
    serving_embedding,
    serving_score,
    serving_invocations,
    serving_audio,
)


def build_app(context: ServerContext) -> FastAPI:
    """Return the application with all routes and middleware.

    Raises:
        ConfigError: middleware of the user cannot be loaded.
    """
    args = context.args
    app = FastAPI(
        title="vllm",
        version=__version__,
        summary="LLM inference with the OpenAI API",
        openapi_url=None,  # served by `operations.description` instead
        docs_url=None,  # FastAPI's page would load code from another host
        redoc_url=None,
        redirect_slashes=False,
        # The middleware below makes metrics and spans. Versions of FastAPI without this argument
        # ignore it.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.root_path = args.root_path
    app.state.context = context
    routers = _routers(args)
    for router in routers:
        app.include_router(router)
    add_error_handlers(app)
    UnknownRoutes(routers).add_to(app)
    app.add_middleware(DirectRoutes, server=app, routers=routers)
    _add_middleware(app, context, routers)
    metrics_route.count_http(app, routers)
    return app


MEDIA_PATHS = frozenset(
    (
        *("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
        *("/v1/responses/input_tokens", "/tokenize", "/v1/embeddings", "/pooling", "/invocations"),
    )
)
"""Paths of the routes whose requests may have images, sounds or videos."""

AUDIO_PATHS = frozenset(("/v1/audio/transcriptions", "/v1/audio/translations"))
"""Paths of the routes whose requests are forms with a file of sound."""
_FORM_BYTES = 2**20
"""Limit of the rest of a form with a file."""


def _routers(args: ServerArgs) -> list[APIRouter]:
    routers = [module.router for module in (*_MODEL_ROUTES, health, metrics_route)]
    if not args.disable_fastapi_docs:
        routers.append(description.router)
    if args.can_update_adapters:
        routers.append(serving_lora.router)
    if args.dev_mode:
        routers.append(dev_routes.router)
    if args.can_profile:
        routers.append(dev_routes.profile_router)
    return [*routers, *page_routers(args)]


def _add_middleware(app: FastAPI, context: ServerContext, routers: list[APIRouter]) -> None:
    """Add the middleware, innermost first. The middleware that is added last sees a request
    first.
    """
    args = context.args
    app.add_middleware(CatchErrors)
    if args.log_requests:
        app.add_middleware(RequestLog, max_log_len=args.max_log_len)
    app.add_middleware(Gate, context=context, routes=app)
    app.add_middleware(
        BodyLimits,
        limit_of=partial(_size_limit, context),
        timeout_s=args.body_timeout,
        routers=routers,
    )
    add_user_middleware(app, args.middleware)
    if args.api_key:
        app.add_middleware(Authentication, keys=args.api_key)
    # Only passed if requested, because old versions of Starlette do not have it.
    private: dict[str, Any] = {"allow_private_network": True} if args.allow_private_network else {}
    app.add_middleware(
        CORSMiddleware,
        allow_origins=args.allowed_origins,
        allow_methods=args.allowed_methods,
        allow_headers=args.allowed_headers,
        allow_credentials=args.allow_credentials,
        **private,
    )
    app.add_middleware(HttpManners, routers=routers)
    if not args.disable_uvicorn_access_log:
        app.add_middleware(AccessLog)
    if args.otlp_traces_endpoint is not None:
        _add_tracing(app, context, args.otlp_traces_endpoint)
    if args.enable_request_id_headers or args.otlp_traces_endpoint is not None:
        app.add_middleware(RequestIds, is_sent_back=args.enable_request_id_headers)
    app.add_middleware(CountRequests, context=context)


def _size_limit(context: ServerContext, path: str) -> SizeLimit:
    """Return the size limit for bodies of a path. Until the model is known, it is assumed to read
    media.
    """
    args, engine = context.args, context.engine
    if path in AUDIO_PATHS and not (engine.is_loaded and context.speech is None):
        most = envs.get().VLLM_MAX_AUDIO_CLIP_FILESIZE_MB * 2**20 + _FORM_BYTES
        return SizeLimit(most, "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB")
    is_text = engine.is_loaded and media_rules(engine.input_processor) is None
    if path not in MEDIA_PATHS or is_text:
        return SizeLimit(args.max_request_bytes, "--max-request-bytes")
    most = max(args.max_request_bytes, args.max_media_request_bytes)
    return SizeLimit(most, "--max-media-request-bytes")


def _add_tracing(app: FastAPI, context: ServerContext, endpoint: str) -> None:
    from vllm.entrypoints.middleware.request_spans import RequestSpans
    from vllm.utils.otel import Tracer

    context.tracer = Tracer(endpoint)
    app.add_middleware(RequestSpans, context=context, tracer=context.tracer)


def load_server(engine: AsyncLLM, args: ServerArgs) -> tuple[ServerContext, FastAPI]:
    """Create the context and the application for an engine, which may start later.

    Raises:
        ConfigError: middleware or tracing cannot be used.
    """
    context = ServerContext(args, engine, created=time.time())
    return context, build_app(context)
