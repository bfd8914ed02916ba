"""Test the probes in each state of the engine and of the server."""

import pytest
from starlette.testclient import TestClient

from tests.entrypoints.openai.observed_server import ObservedEngine
from tests.entrypoints.openai.server_fakes import make_app
from vllm.errors import EngineDeadError
from vllm.messages import SchedulerStats, WarmUpStats


def in_state(state):
    app, context = make_app(is_ready=state in ("ready", "draining", "paused"))
    startup = context.engine.startup
    if state == "starting":
        startup.report("compiling graphs", 3, 12, 41.26)
    if state == "draining":
        context.is_draining = True
    if state == "paused":
        context.engine.refusal = "the engine is asleep"
    if state == "failed":
        startup.set_failed(EngineDeadError("gone"))
    if state == "restarting":
        context.has_been_ready = True
        startup.set_unready("restarting the engine")
    return TestClient(app)


@pytest.mark.parametrize(
    ("state", "startupz", "readyz", "health"),
    [
        ("starting", 503, 503, 503),
        ("ready", 200, 200, 200),
        ("paused", 200, 503, 200),
        ("draining", 200, 503, 503),
        ("restarting", 200, 503, 503),
        ("failed", 503, 503, 503),
    ],
)
def test_probes_tell_the_state(state, startupz, readyz, health):
    client = in_state(state)
    assert client.get("/livez").status_code == 200
    assert client.get("/startupz").status_code == startupz
    assert client.get("/readyz").status_code == readyz
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        response = client.request(method, path)
        assert (response.status_code, response.content) == (health, b"")
    response = client.get("/load")
    assert (response.status_code, response.json()) == (200, {"server_load": 0})


def test_a_server_that_runs_but_takes_no_requests_says_why():
    body = in_state("paused").get("/readyz").json()
    assert body == {"status": "paused", "phase": "ready", "message": "the engine is asleep"}


def test_a_server_that_still_warms_up_says_how_far_it_is():
    app, context = make_app(is_ready=True)
    client = TestClient(app)
    observed = ObservedEngine("hpu")
    context.engine.metrics = observed.metrics
    assert "warm_up" not in client.get("/readyz").json()
    observed.core_metrics.stats = SchedulerStats(
        warm_up=WarmUpStats(
            is_warming=True,
            num_warm=16,
            num_wanted=86,
            seconds_left=41.26,
            longest_delay_s=0.3456,
            padded_share=0.12345,
        )
    )
    body = client.get("/readyz").json()
    assert body["warm_up"] == {
        "is_warming": True,
        "warm_buckets": 16,
        "wanted_buckets": 86,
        "seconds_left": 41.3,
        "padded_share": 0.1235,
        "longest_delay_s": 0.346,
    }


def test_progress_is_shown_while_the_engine_starts():
    body = in_state("starting").get("/readyz").json()
    assert body == {
        "status": "starting",
        "phase": "compiling graphs",
        "done": 3,
        "total": 12,
        "eta_seconds": 41.3,
    }


@pytest.mark.parametrize(
    ("state", "status", "phase"),
    [
        ("ready", "ready", "ready"),
        ("draining", "draining", "ready"),
        ("failed", "failed", "failed"),
    ],
)
def test_the_state_is_shown_in_words(state, status, phase):
    assert in_state(state).get("/startupz").json() == {"status": status, "phase": phase}
