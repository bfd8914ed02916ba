"""Test that each request to a model route gives one span."""

import asyncio
from collections import deque
from types import SimpleNamespace

import pytest

from vllm.engine.metrics.engine_metrics import FinishedRequestStats
from vllm.entrypoints.middleware.request_spans import RequestSpans


class FakeTracer:
    """Stores spans as (name, headers, attributes, error)."""

    def __init__(self):
        self.spans = []

    def begin(self, name, headers, attributes):
        return SimpleNamespace(
            end=lambda more, *, error=None: self.spans.append(
                (name, headers, {**attributes, **more}, error)
            )
        )


def finished(request_id):
    return FinishedRequestStats(
        finish_reason="length",
        num_prompt_tokens=3,
        num_generation_tokens=5,
        n=1,
        max_tokens=5,
        arrival=10.0,
        first_scheduled=10.5,
        first_token=11.0,
        last_token=12.0,
        finished=12.0,
        request_id=request_id,
    )


def trace(path="/v1/completions", *, status=200):
    """Return the spans of one request with the id `abc`."""
    recent = deque([finished("cmpl-abc-0"), finished("cmpl-other"), finished("cmpl-abc-1")])
    engine = SimpleNamespace(metrics=SimpleNamespace(recent=recent))
    tracer = FakeTracer()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    async def send(message):
        assert message["type"].startswith("http.")

    context = SimpleNamespace(engine=engine)
    scope = {"type": "http", "method": "POST", "path": path, "root_path": ""}
    scope["headers"] = [(b"x-request-id", b"abc"), (b"traceparent", b"00-1-2-3")]
    asyncio.run(RequestSpans(app, context, tracer)(scope, None, send))
    return tracer.spans


def test_a_span_tells_what_the_engine_computed_for_all_prompts_of_the_request():
    ((name, headers, attributes, error),) = trace()
    assert name == "POST /v1/completions" and headers["traceparent"] == "00-1-2-3"
    assert error is None
    assert attributes["gen_ai.request.id"] == "abc"
    assert attributes["gen_ai.usage.prompt_tokens"] == 6
    assert attributes["gen_ai.usage.completion_tokens"] == 10
    assert attributes["gen_ai.latency.time_in_queue"] == 0.5
    assert attributes["gen_ai.latency.time_to_first_token"] == 1.0
    assert attributes["gen_ai.latency.e2e"] >= attributes["http.response.first_byte_s"] >= 0


def test_a_failure_is_one_in_the_span():
    ((*_, attributes, error),) = trace(status=503)
    assert (attributes["http.response.status_code"], error) == (503, "status 503")


@pytest.mark.parametrize("path", ["/livez", "/metrics", "/version"])
def test_what_needs_no_model_makes_no_span(path):
    assert trace(path) == []
