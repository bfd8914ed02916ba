"""Test requests that arrive before the engine is ready, while it shuts down, or after it has
failed.
"""

import asyncio
import json

import pytest
from starlette.testclient import TestClient

from tests.entrypoints.openai.server_fakes import make_app
from vllm.errors import EngineDeadError


class Call:
    """One request to an application, in an event loop that the test runs."""

    def __init__(self, app, path="/echo", body=b"{}"):
        self.messages = asyncio.Queue()
        self.messages.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self.sent = []
        headers = [(b"content-type", b"application/json"), (b"content-length", b"2")]
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
        scope |= {"headers": headers, "query_string": b"", "root_path": "", "client": ("c", 1)}
        self.task = asyncio.ensure_future(app(scope, self.messages.get, self.send))

    async def send(self, message):
        self.sent.append(message)

    def leave(self):
        self.messages.put_nowait({"type": "http.disconnect"})

    @property
    def status(self):
        return self.sent[0]["status"] if self.sent else None

    @property
    def body(self):
        return json.loads(b"".join(message.get("body", b"") for message in self.sent))


async def settle():
    for _ in range(50):
        await asyncio.sleep(0)


def run(test):
    asyncio.run(asyncio.wait_for(test, 120))


def test_early_requests_wait_and_are_answered():
    async def test():
        app, context = make_app(is_ready=False)
        calls = [Call(app) for _ in range(3)]
        await settle()
        assert [call.status for call in calls] == [None] * 3
        assert context.num_in_progress == 3
        context.engine.startup.set_ready()
        await asyncio.gather(*(call.task for call in calls))
        assert [call.status for call in calls] == [200] * 3
        assert calls[0].body["body"] == "{}"
        assert context.num_in_progress == 0

    run(test())


def test_an_early_request_whose_client_leaves_stops_waiting():
    async def test():
        app, context = make_app(is_ready=False, max_queued_requests=1)
        gone = Call(app)
        await settle()
        gone.leave()
        await gone.task
        assert gone.sent == [] and context.num_in_progress == 0
        waiting = Call(app)  # the slot of the request that has left is free again
        await settle()
        assert waiting.status is None
        context.engine.startup.set_ready()
        await waiting.task
        assert waiting.status == 200

    run(test())


def test_no_more_than_max_queued_requests_wait():
    async def test():
        app, context = make_app(is_ready=False, max_queued_requests=2)
        calls = [Call(app) for _ in range(4)]
        await settle()
        assert [call.status for call in calls] == [None, None, 503, 503]
        assert "max_queued_requests" in calls[2].body["error"]["message"]
        context.engine.startup.set_ready()
        await asyncio.gather(*(call.task for call in calls))
        assert [call.status for call in calls] == [200, 200, 503, 503]

    run(test())


def test_those_who_wait_are_told_that_the_start_failed():
    async def test():
        app, context = make_app(is_ready=False)
        call = Call(app)
        await settle()
        context.engine.startup.set_failed(EngineDeadError("the engine process has ended"))
        await call.task
        assert (call.status, call.body["error"]["code"]) == (500, "engine_dead")

    run(test())


def test_those_who_wait_are_told_of_a_shutdown():
    async def test():
        app, context = make_app(is_ready=False)
        call = Call(app)
        await settle()
        context.is_draining = True
        context.engine.startup.set_failed(EngineDeadError("the engine was shut down"))
        await call.task
        assert (call.status, call.body["error"]["message"]) == (503, "the server is shutting down")

    run(test())


def test_early_requests_may_be_rejected_with_the_time_to_wait():
    app, context = make_app(is_ready=False, early_requests="reject")
    context.engine.startup.report("compiling graphs", 3, 12, 93.2)
    client = TestClient(app)
    response = client.post("/echo", json={})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "94"
    assert "compiling graphs, 3 of 12" in response.json()["error"]["message"]
    context.engine.startup.set_ready()
    assert client.post("/echo", json={}).status_code == 200


def test_routes_of_every_router_are_behind_the_gate():
    app, _ = make_app(is_ready=False, early_requests="reject", dev_mode=True)
    assert TestClient(app).post("/reset_prefix_cache").status_code == 503


def test_a_server_that_drains_takes_no_more_requests():
    app, context = make_app()
    context.is_draining = True
    response = TestClient(app).post("/echo", json={})
    assert response.status_code == 503
    assert response.headers["connection"] == "close"


def test_a_dead_engine_is_500_with_the_reason():
    app, context = make_app()
    context.engine.startup.set_failed(EngineDeadError("the engine process has ended (signal 9)"))
    response = TestClient(app).post("/echo", json={})
    assert response.status_code == 500
    assert "signal 9" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/version", "/load", "/docs", "/openapi.json"])
def test_what_needs_no_model_is_answered_at_once(path):
    app, _ = make_app(is_ready=False, early_requests="reject")
    assert TestClient(app).get(path).status_code == 200


def test_an_unknown_path_does_not_wait():
    app, _ = make_app(is_ready=False)
    assert TestClient(app).post("/v1/nothing", json={}).status_code == 404
