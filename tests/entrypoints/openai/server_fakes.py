"""A server with an engine whose start the test controls."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.testclient import TestClient

from tests.engine.fakes import make_config
from vllm.engine.async_llm_engine import AsyncLLM
from vllm.engine.replicas.core_replicas import ReplicaState
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.shared.context import ServerContext
from vllm.entrypoints.shared.server_args import ServerArgs


def _recorded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method with the signature of an `AsyncLLM` method that only records its calls."""

    @wraps(method)
    async def call(self: "ControlledEngine", /, *args: Any, **kwargs: Any) -> Any:
        bound = signature(method).bind(self, *args, **kwargs)
        bound.apply_defaults()
        self.controls.append((method.__name__, *bound.args[1:]))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    return call


class ControlledEngine(AsyncLLM):
    """The real engine without a core: the test sets its state, and the results of calls.

    Attributes:
        controls: recorded calls that control the engine, with their arguments.
        answer: result of all these calls; an exception is raised.
        refusal: reason why it accepts no new requests although it runs.
    """

    refusal: str | None = None  # type: ignore[assignment]

    def __init__(self, *, is_ready: bool = True) -> None:
        super().__init__(config=make_config())
        if is_ready:
            self.startup.set_ready()
        self.controls: list[tuple[Any, ...]] = []
        self.answer: Any = None

    collective_rpc = _recorded(AsyncLLM.collective_rpc)
    sleep = _recorded(AsyncLLM.sleep)
    wake_up = _recorded(AsyncLLM.wake_up)
    is_sleeping = _recorded(AsyncLLM.is_sleeping)
    start_profile = _recorded(AsyncLLM.start_profile)
    stop_profile = _recorded(AsyncLLM.stop_profile)
    drain_replica = _recorded(AsyncLLM.drain_replica)
    resume_replica = _recorded(AsyncLLM.resume_replica)
    restart_replica = _recorded(AsyncLLM.restart_replica)

    def replica_states(self) -> list[ReplicaState]:
        return [ReplicaState(0, "ready", 7, 1, 20, 0), ReplicaState(1, "failed", None, 0, 0, 2)]


def make_app(*, is_ready: bool = True, **settings: Any) -> tuple[FastAPI, ServerContext]:
    """Return the application, with two routes for tests: /echo and /fail."""
    context = ServerContext(
        ServerArgs(**settings), ControlledEngine(is_ready=is_ready), created=0.0
    )
    app = build_app(context)

    @app.api_route("/echo", methods=["GET", "POST"], include_in_schema=False)
    async def echo(request: Request) -> dict[str, Any]:
        body = await request.body()
        return {"body": body.decode("latin-1"), "id": request.headers.get("x-request-id")}

    @app.get("/fail", include_in_schema=False)
    async def fail() -> None:
        raise RuntimeError("the password is sesame")

    return app, context


def make_client(*, is_ready: bool = True, **settings: Any) -> TestClient:
    """Return a client of `make_app` that sees status 500 instead of the exception."""
    app, _ = make_app(is_ready=is_ready, **settings)
    return TestClient(app, raise_server_exceptions=False)
