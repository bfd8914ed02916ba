"""Serve GET /metrics, and count HTTP requests as metrics in addition to the engine's metrics.

Labels come from fixed sets: route templates, known methods, status classes. Nothing that a client
sends becomes a label.
"""

import time
from collections.abc import Iterable

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response
from starlette.routing import Route, compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm.engine.metrics.media_metrics import fetch_metrics
from vllm.engine.metrics.registry import MetricSet, expose, process_collectors
from vllm.engine.metrics.replica_metrics import ReadableMetrics
from vllm.entrypoints.http.asgi import SeenStatus, route_path
from vllm.entrypoints.shared.card_telemetry import card_metrics
from vllm.entrypoints.shared.context import ServerContext, get_context

router = APIRouter(tags=["metrics"])

_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})
_SCOPE_KEY = "vllm.http_metrics"
_NO_ROUTE = "none"
_NO_RESPONSE = "none"
_REJECTED = {
    400: "invalid",
    401: "unauthorized",
    404: "not_found",
    413: "too_large",
    503: "unavailable",
    504: "timeout",
}
_DURATION_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class HttpMetrics:
    """HTTP metrics of one server.

    Args:
        templates: paths of its routes, with parameters in braces.
    """

    def __init__(self, templates: Iterable[str]) -> None:
        known = set(templates)
        self._static = {path for path in known if "{" not in path}
        self._patterns = [(compile_path(path)[0], path) for path in sorted(known - self._static)]
        self.metrics = MetricSet()
        self._in_progress = self.metrics.gauge(
            "http_requests_inprogress", "Number of HTTP requests in progress."
        )
        self._requests = self.metrics.counters(
            "http_requests", "Number of HTTP requests.", "handler", "method", "status"
        )
        self._seconds = self.metrics.histograms(
            "http_request_duration_seconds",
            "Seconds from an HTTP request to the end of its response.",
            _DURATION_S,
            "handler",
            "method",
        )
        self._rejected = self.metrics.counters(
            "vllm:requests_rejected",
            "Number of model requests that were rejected, by reason.",
            "reason",
        )
        for reason in _REJECTED.values():
            self._rejected.cell(reason)

    def begin(self) -> None:
        """Count a request that has arrived."""
        self._in_progress.value += 1

    def end(self, path: str, method: str, status: int, seconds: float) -> None:
        """Count the end of a response. Status 0: no response was sent, because the client
        disconnected.
        """
        self._in_progress.value -= 1
        handler = self._template_of(path)
        method = method if method in _METHODS else "OTHER"
        status_class = f"{status // 100}xx" if status else _NO_RESPONSE
        self._requests.cell(handler, method, status_class).add()
        self._seconds.cell(handler, method).observe(seconds)
        reason = _REJECTED.get(status)
        if reason is not None and method == "POST" and handler != _NO_ROUTE:
            self._rejected.cell(reason).add()

    def _template_of(self, path: str) -> str:
        path = "/" + path.strip("/")  # as the routes see it
        if path in self._static:
            return path
        for pattern, template in self._patterns:
            if pattern.match(path):
                return template
        return _NO_ROUTE


class CountHttp:
    """Counts every request. It is the outermost middleware, so that refused requests are also
    counted.
    """

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        seen = SeenStatus(send)
        start = time.perf_counter()
        scope[_SCOPE_KEY] = self._metrics
        self._metrics.begin()
        try:
            await self.app(scope, receive, seen.send)
        except Exception:
            seen.status = seen.status or 500  # an unhandled exception becomes a 500
            raise
        finally:
            seconds = time.perf_counter() - start
            self._metrics.end(route_path(scope), scope["method"], seen.status, seconds)


def engine_metrics(context: ServerContext) -> ReadableMetrics | None:
    """Return the metrics of the engine; None before it is ready for the first time."""
    is_there = context.has_been_ready or context.engine.startup.is_ready
    return context.engine.metrics if is_there else None


def count_http(app: FastAPI, routers: Iterable[APIRouter]) -> None:
    """Add the middleware that counts all requests to a server, for its GET /metrics.

    Call this after all other middleware was added, because the last one is the outermost.

    Args:
        app: the application. Its own routes are found, but not the routes of included routers.
        routers: routers that the application includes, without a prefix.
    """
    routes = [*app.routes, *(route for included in routers for route in included.routes)]
    metrics = HttpMetrics(route.path for route in routes if isinstance(route, Route))
    app.add_middleware(CountHttp, metrics=metrics)


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    """Return all metrics, in the format that the scraper accepts."""
    context = get_context(request)
    engine = engine_metrics(context)
    cards = await context.card_readings()
    http: HttpMetrics | None = request.scope.get(_SCOPE_KEY)
    sets = [] if engine is None else [*engine.metric_sets()]
    if engine is not None and engine.read_media() is not None:
        sets.append(fetch_metrics(context.media_fetcher.times, engine.model_name))
    sets += [] if http is None else [http.metrics]
    sets += [card_metrics(cards)] if cards else []
    accept = request.headers.get("accept", "")
    body, content_type = expose([*sets, *process_collectors()], accept)
    return Response(body, headers={"content-type": content_type})
