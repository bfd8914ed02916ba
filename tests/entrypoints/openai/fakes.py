"""An application with some routes, and an engine over a fake core."""

import time
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.testclient import TestClient

from tests.fake_core import FakeCoreLLM, running
from vllm.entrypoints.http.errors import add_error_handlers
from vllm.entrypoints.shared.context import ServerContext
from vllm.entrypoints.shared.server_args import ServerArgs

MODEL = "stdlib"


def make_app(engine: Any, *routers: APIRouter, **args: Any) -> FastAPI:
    """Return an application with these routes and no middleware."""
    app = FastAPI()
    app.state.context = ServerContext(ServerArgs(**args), engine, time.time())
    for router in routers:
        app.include_router(router)
    add_error_handlers(app)
    return app


@contextmanager
def client_of(engine: FakeCoreLLM | None, *routers: APIRouter, **args: Any):
    """Return a client of such an application, whose engine runs meanwhile. Errors of the server
    become responses.
    """
    app = make_app(engine, *routers, **args)
    if engine is not None:
        app.router.lifespan_context = lambda app: running(engine)
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client
