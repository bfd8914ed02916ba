"""Test the status page as an HTTP client sees it; tests/e2e/test_status_page.py opens it in a
browser.
"""

import pytest
from starlette.testclient import TestClient

from tests.entrypoints.openai.observed_server import KEY, ObservedEngine, make_app, ready_engine
from vllm.errors import EngineDeadError
from vllm.messages import SchedulerStats


def status_of(engine: ObservedEngine) -> dict:
    response = TestClient(make_app(engine)).get("/status.json")
    assert response.headers["cache-control"] == "no-store"
    return response.json()


def test_a_start_tells_phase_and_progress_and_nothing_of_the_engine():
    engine = ObservedEngine()
    engine.startup.report("warming up", 12, 40, 33.0)
    status = status_of(engine)
    assert status["eta_s"] == 33.0
    assert (status["state"], status["phase"]) == ("starting", "warming up")
    assert (status["done"], status["total"]) == (12, 40)
    assert 4000 <= status["uptime_s"] < 4100
    assert "running" not in status


def test_a_busy_engine_is_described():
    engine = ready_engine()
    engine.work(num_tokens=64)
    engine.finish("cmpl-1")
    engine.finish("cmpl-2", "error")
    status = status_of(engine)
    recent = status.pop("recent")
    cells = status.pop("traffic")["cells"]
    assert cells == [["decode", 6, 1, 152, 2, 0]]
    expected = {
        "state": "ready",
        "model": "stdlib",
        "running": 6,
        "waiting": 3,
        "kv_usage": 0.421,
        "prefix_hit_rate": 0.64,
        "bucket_hits": 41,
        "bucket_misses": 1,
        "late_compilations": 5,
        "padded_share": 0.1,
        "padded_blocks_share": 0.25,
        "padded_time_share": 0.014,
        "generation_tokens": 64,
        "prompt_tokens": 10,
        "max_model_len": 2048,
    }
    assert {name: status[name] for name in expected} == expected
    assert [(r["id"], r["reason"]) for r in recent] == [("cmpl-2", "error"), ("cmpl-1", "stop")]
    del recent[0]["finished"]
    assert recent[0] == {
        "id": "cmpl-2",
        "reason": "error",
        "queue_s": 0.1,
        "first_token_s": 0.25,
        "total_s": 2.0,
        "prompt_tokens": 120,
        "cached_tokens": 64,
        "generation_tokens": 48,
    }


def test_an_id_that_a_client_has_made_long_is_cut():
    engine = ready_engine()
    engine.finish("x" * 60_000)
    assert status_of(engine)["recent"][0]["id"] == "x" * 128


def test_shares_of_nothing_are_not_known():
    status = status_of(ready_engine())
    assert (status["prefix_hit_rate"], status["padded_share"]) == (None, None)


@pytest.mark.parametrize(
    ("change", "state"),
    [
        (lambda engine, context: engine.startup.set_failed(EngineDeadError("gone")), "failed"),
        (lambda engine, context: setattr(context, "is_draining", True), "draining"),
        (lambda engine, context: engine.startup.set_unready("restarting"), "starting"),
    ],
)
def test_states_have_one_word(change, state):
    engine = ready_engine()
    app = make_app(engine)
    app.state.context.has_been_ready = True
    change(engine, app.state.context)
    status = TestClient(app).get("/status.json").json()
    assert status["state"] == state
    assert "gone" not in str(status)
    assert status["running"] == SchedulerStats().num_running


def test_figures_need_the_key():
    client = TestClient(make_app(ready_engine(), keys=(KEY,)))
    assert client.get("/status.json").status_code == 401
    headers = {"Authorization": f"Bearer {KEY}"}
    assert client.get("/status.json", headers=headers).json()["state"] == "ready"


def test_buckets_are_those_of_the_workers_while_the_engine_runs():
    engine = ready_engine()
    engine.buckets = [(0, 1, 128, 0, True), (1, 4, 1, 100, False)]
    client = TestClient(make_app(engine))
    found = client.get("/status_buckets.json").json()["buckets"]
    assert found == [["prefill", 1, 128, 0, True], ["decode", 4, 1, 100, False]]
    assert TestClient(make_app(ObservedEngine())).get("/status_buckets.json").json() == {
        "buckets": []
    }
