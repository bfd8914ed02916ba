"""A server without an engine: the application around one whose start the test decides."""

from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.testclient import TestClient

from vllm.engine.process.startup_state import StartupState
from vllm.engine.replicas.core_replicas import ReplicaState
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.shared.context import ServerContext
from vllm.entrypoints.shared.server_args import ServerArgs


class FakeEngine:
    """What the server asks of an engine besides generating.

    Attributes:
        controls: calls that control the engine, with their arguments.
        answer: of all of them; an exception is raised.
        refusal: why it takes no new requests, although it runs.
    """

    def __init__(self, *, is_ready: bool = True) -> None:
        self.startup = StartupState()
        if is_ready:
            self.startup.set_ready()
        self.is_cache_free = True
        self.controls: list[tuple[Any, ...]] = []
        self.answer: Any = None
        self.refusal: str | None = None
        self.vllm_config = SimpleNamespace(
            model=SimpleNamespace(served_model_name=("fake",), model="fake")
        )

    @property
    def errored(self) -> bool:
        return self.startup.error is not None

    async def reset_prefix_cache(self) -> bool:
        return self.is_cache_free

    async def collective_rpc(self, method: str, timeout: Any, args: Any, kwargs: Any) -> list[Any]:
        return await self._control("collective_rpc", method, timeout, args, kwargs)

    async def sleep(self, level: int) -> None:
        await self._control("sleep", level)

    async def wake_up(self, tags: list[str] | None) -> None:
        await self._control("wake_up", tags)

    async def is_sleeping(self) -> bool:
        return bool(await self._control("is_sleeping"))

    async def start_profile(self) -> None:
        await self._control("start_profile")

    async def stop_profile(self) -> Any:
        return await self._control("stop_profile")

    def replica_states(self) -> list[ReplicaState]:
        return [ReplicaState(0, "ready", 7, 1, 20, 0), ReplicaState(1, "failed", None, 0, 0, 2)]

    async def drain_replica(self, replica: int) -> None:
        await self._control("drain", replica)

    async def resume_replica(self, replica: int) -> None:
        await self._control("resume", replica)

    async def restart_replica(self, replica: int, timeout: float | None) -> None:
        await self._control("restart", replica, timeout)

    async def _control(self, name: str, *args: Any) -> Any:
        self.controls.append((name, *args))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


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
