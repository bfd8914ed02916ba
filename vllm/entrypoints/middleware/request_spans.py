"""Create one OpenTelemetry span for each request to a model route."""

import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.engine.metrics.engine_metrics import FinishedRequestStats
from vllm.entrypoints.http.asgi import get_header, route_path
from vllm.entrypoints.middleware.gate import UNGATED
from vllm.entrypoints.shared.context import ServerContext
from vllm.utils.otel import AttributeValue, Tracer


class RequestSpans:
    """Creates a span for each request, with the engine's statistics of the request.

    Must be inside `RequestIds`, because the id in the headers is a part of the ids in the engine.
    """

    def __init__(self, app: ASGIApp, context: ServerContext, tracer: Tracer) -> None:
        self.app = app
        self._context = context
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) in UNGATED:
            await self.app(scope, receive, send)
            return
        start, first_s, status = time.perf_counter(), None, 0
        span = self._tracer.begin(
            f"{scope['method']} {scope['path'][:100]}",
            {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]},
            {"http.request.method": scope["method"], "url.path": scope["path"]},
        )

        async def watch(message: Message) -> None:
            nonlocal first_s, status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif first_s is None:
                first_s = time.perf_counter() - start
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            attributes: dict[str, AttributeValue] = {
                "http.response.status_code": status,
                "gen_ai.latency.e2e": time.perf_counter() - start,
            }
            if first_s is not None:
                attributes["http.response.first_byte_s"] = first_s
            request_id = get_header(scope, b"x-request-id")
            if request_id is not None:
                attributes["gen_ai.request.id"] = request_id
                attributes |= _describe(self._finished(request_id))
            error = f"status {status}" if status >= 500 or status == 0 else None
            span.end(attributes, error=error)

    def _finished(self, request_id: str) -> list[FinishedRequestStats]:
        """Return the engine's statistics of the request, one entry per prompt."""
        metrics = self._context.engine.metrics
        if metrics is None:
            return []
        return [stats for stats in metrics.recent if request_id in stats.request_id]


def _describe(finished: Sequence[FinishedRequestStats]) -> dict[str, AttributeValue]:
    if not finished:
        return {}
    attributes: dict[str, AttributeValue] = {
        "gen_ai.usage.prompt_tokens": sum(stats.num_prompt_tokens for stats in finished),
        "gen_ai.usage.completion_tokens": sum(stats.num_generation_tokens for stats in finished),
        "gen_ai.request.n": finished[0].n,
        "gen_ai.response.finish_reasons": finished[0].finish_reason,
    }
    times = {
        "gen_ai.latency.time_in_queue": [stats.queue_s for stats in finished],
        "gen_ai.latency.time_to_first_token": [stats.first_token_s for stats in finished],
    }
    for name, values in times.items():
        known = [value for value in values if value is not None]
        if known:
            attributes[name] = min(known)
    return attributes
