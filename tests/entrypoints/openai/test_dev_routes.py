"""Test the routes that control the engine: their calls, their answers, and when they exist."""

import pytest
from starlette.testclient import TestClient

from tests.entrypoints.openai.server_fakes import make_app
from vllm.errors import CapacityError, RequestError, RequestTimeoutError, WorkerCallError

DEV = {"dev_mode": True}
PROFILE = {"can_profile": True}


def send(path, *, answer=None, body=None, method="POST", settings=DEV):
    """Send a request; return the response, and the calls that the engine got."""
    app, context = make_app(**settings)
    context.engine.answer = answer
    client = TestClient(app, raise_server_exceptions=False)
    return client.request(method, path, json=body), context.engine.controls


@pytest.mark.parametrize(
    ("path", "control"),
    [
        ("/sleep", ("sleep", 1)),
        ("/sleep?level=2", ("sleep", 2)),
        ("/wake_up", ("wake_up", None)),
        ("/wake_up?tags=weights&tags=kv_cache", ("wake_up", ["weights", "kv_cache"])),
        ("/wake_up?tags=weights", ("wake_up", ["weights"])),
    ],
)
def test_sleep_and_wake_up_take_their_arguments_from_the_query(path, control):
    response, controls = send(path)
    assert (response.status_code, response.content, controls) == (200, b"", [control])


@pytest.mark.parametrize("answer", [False, True])
def test_whether_it_sleeps_can_be_asked(answer):
    response, _ = send("/is_sleeping", answer=answer, method="GET")
    assert response.json() == {"is_sleeping": answer}


@pytest.mark.parametrize(
    ("body", "control"),
    [
        ({"method": "m"}, ("collective_rpc", "m", None, [], {})),
        (
            {"method": "m", "args": [1, "x"], "kwargs": {"a": None}, "timeout": 2},
            ("collective_rpc", "m", 2.0, [1, "x"], {"a": None}),
        ),
    ],
)
def test_a_method_of_the_workers_is_called_by_name(body, control):
    response, controls = send("/collective_rpc", body=body, answer=[{"x": 1, "y": b"\xff"}])
    assert controls == [control]
    assert response.json() == {"results": [{"x": 1, "y": "/w=="}]}


@pytest.mark.parametrize(
    "body", [{}, {"method": 1}, {"method": "m", "args": {}}, {"method": "m", "timeout": 0}, None]
)
def test_a_wrong_call_is_refused(body):
    response, controls = send("/collective_rpc", body=body)
    assert response.status_code == 400 and not controls


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("sleep mode is off"), 400, "invalid_request_error"),
        (CapacityError("2 requests run", status=409), 409, "conflict_error"),
        (CapacityError("asleep", status=503), 503, "service_unavailable_error"),
        (WorkerCallError("KeyError: 1"), 500, "server_error"),
        (RequestTimeoutError("too long"), 504, "timeout_error"),
    ],
)
@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/collective_rpc"])
def test_the_error_of_a_call_is_told(path, error, status, kind):
    response, _ = send(path, answer=error, body={"method": "m"})
    told = response.json()["error"]
    assert (response.status_code, told["type"], told["message"]) == (status, kind, str(error))


def test_level_and_tags_must_be_what_they_are():
    assert send("/sleep?level=deep")[0].status_code == 400


@pytest.mark.parametrize("name", ["start_profile", "stop_profile"])
def test_profiles_are_begun_and_ended_where_there_is_a_folder_for_them(name):
    response, controls = send(f"/{name}", settings=PROFILE)
    assert response.status_code == 200 and controls == [(name,)]
    assert send(f"/{name}", settings=DEV)[0].status_code == 404


def test_the_end_of_a_profile_tells_which_replicas_have_no_trace():
    response, _ = send("/stop_profile", settings=PROFILE, answer=["replica 1 has no trace"])
    assert (response.status_code, response.json()) == (200, {"message": "replica 1 has no trace"})


@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/collective_rpc"])
def test_only_development_mode_has_routes_that_control_the_engine(path):
    response, controls = send(path, settings=PROFILE)
    assert response.status_code == 404 and not controls


@pytest.mark.parametrize(
    ("path", "control"),
    [
        ("/replicas/1/drain", ("drain_replica", 1)),
        ("/replicas/0/resume", ("resume_replica", 0)),
        ("/replicas/1/restart", ("restart_replica", 1, None)),
        ("/replicas/1/restart?timeout=2.5", ("restart_replica", 1, 2.5)),
    ],
)
def test_replicas_are_drained_and_restarted_one_by_one(path, control):
    response, controls = send(path)
    assert (response.status_code, controls) == (200, [control])
    response, _ = send(path, answer=RequestError("no such replica", param="replica"))
    assert response.status_code == 400
    assert send(path, settings=PROFILE)[0].status_code == 404


def test_the_state_of_each_replica_can_be_asked():
    response, _ = send("/replicas", method="GET")
    first, second = response.json()["replicas"]
    assert first == {
        "replica": 0, "state": "ready", "pid": 7, "num_requests": 1, "num_tokens": 20, "restarts": 0
    }  # fmt: skip
    assert (second["state"], second["pid"]) == ("failed", None)


@pytest.mark.parametrize("path", ["/replicas/x/drain", "/replicas/0/restart?timeout=0"])
def test_a_wrong_replica_or_time_is_refused(path):
    response, controls = send(path)
    assert response.status_code == 400 and not controls
