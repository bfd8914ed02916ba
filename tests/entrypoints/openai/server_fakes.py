"""A server without an engine: the application around one whose start the test decides."""

from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.testclient import TestClient

from vllm.engine.startup_state import Startup
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.context import ServerContext
from vllm.entrypoints.openai.server_args import ServerArgs


class FakeEngine:
    """What the server asks of an engine besides generating."""

    def __init__(self, *, is_ready: bool = True) -> None:
        self.startup = Startup()
        if is_ready:
            self.startup.set_ready()
        self.is_cache_free = True
        self.vllm_config = SimpleNamespace(
            model=SimpleNamespace(served_model_name=("fake",), model="fake")
        )

    @property
    def errored(self) -> bool:
        return self.startup.error is not None

    async def reset_prefix_cache(self) -> bool:
        return self.is_cache_free


def make_app(*, is_ready: bool = True, **settings: Any) -> tuple[FastAPI, ServerContext]:
    """The application, with two routes to try it with: /echo and /fail."""
    context = ServerContext(ServerArgs(**settings), FakeEngine(is_ready=is_ready), created=0.0)
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
    """A client of `make_app` that sees 500 in place of the exception."""
    app, _ = make_app(is_ready=is_ready, **settings)
    return TestClient(app, raise_server_exceptions=False)
