"""An application of some routes, around an engine over a fake core."""

import time
from contextlib import contextmanager, nullcontext
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.testclient import TestClient

from tests.fake_core import FakeCoreLLM, faked
from vllm.entrypoints.shared.context import ServerContext
from vllm.entrypoints.shared.errors import add_error_handlers
from vllm.entrypoints.shared.server_args import ServerArgs

MODEL = "stdlib"


def make_app(engine: Any, *routers: APIRouter, **args: Any) -> FastAPI:
    """An application with these routes and nothing around them."""
    app = FastAPI()
    app.state.context = ServerContext(ServerArgs(**args), engine, time.time())
    for router in routers:
        app.include_router(router)
    add_error_handlers(app)
    return app


@contextmanager
def client_of(engine: FakeCoreLLM | None, *routers: APIRouter, **args: Any):
    """A client of such an application; errors of the server become responses. The engine runs
    meanwhile."""
    app = make_app(engine, *routers, **args)
    with (
        nullcontext() if engine is None else faked(engine),
        TestClient(app, raise_server_exceptions=False) as client,
    ):
        if engine is None:
            yield client
            return
        client.portal.call(engine.start)
        try:
            yield client
        finally:
            client.portal.call(engine.shutdown)
