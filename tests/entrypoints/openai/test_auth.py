"""Test API keys: they protect every route except the probes and the pages, which need the key for
their data.
"""

from base64 import b64encode

import pytest
from starlette.testclient import TestClient

from tests.entrypoints.openai.server_fakes import make_app, make_client
from vllm.entrypoints.http.asgi import PAGES, PROBES
from vllm.entrypoints.shared.server_args import ServerArgs

KEYS = ("first-key", "second-key")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer first-key"}, 200),
        ({"Authorization": "bearer second-key"}, 200),
        ({"x-api-key": "second-key"}, 200),
        ({"Authorization": "Bearer first-ke"}, 401),
        ({"Authorization": "Bearer first-key2"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Basic first-key"}, 401),
        ({"Authorization": "Basic " + b64encode(b"anyone:second-key").decode()}, 200),
        ({"Authorization": "Basic " + b64encode(b"second-key:").decode()}, 401),
        ({"Authorization": "Basic " + b64encode(b"second-key").decode()}, 401),
        ({"Authorization": "first-key"}, 401),
        ({"Authorization": "Basic abc", "x-api-key": "first-key"}, 401),
        ({"x-api-key": ""}, 401),
        ({"Authorization": "Bearer \xff\xfe".encode("latin-1")}, 401),
    ],
)
def test_one_of_the_keys_is_needed(headers, status):
    response = make_client(api_key=KEYS).get("/version", headers=headers)
    assert response.status_code == status
    if status == 401:
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


def test_a_browser_does_not_ask_for_user_and_password():
    """The pages ask for the key themselves. A browser would send its credentials with requests of
    other sites as well.
    """
    response = make_client(api_key=KEYS).get("/openapi.json")
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")


def test_every_route_but_probes_and_empty_pages_is_guarded():
    app, _ = make_app(api_key=KEYS, dev_mode=True)
    client = TestClient(app)
    paths = {
        "/openapi.json",
        "/docs",
        "/",
        "/status",
        "/metrics",
        "/unknown",
        *app.openapi()["paths"],
    }
    paths |= {"/chat.json", "/status.json", "/status_buckets.json"}
    assert {"/version", "/server_info"} | PROBES <= paths
    for path in paths:
        is_open = path in PROBES | PAGES
        for method in ("GET", "POST"):
            status = client.request(method, path).status_code
            assert (status != 401) == is_open, (method, path)


@pytest.mark.parametrize(
    "path",
    ["/health/../version", "//health/version", "/version?/health", "/version;/health", "/Health"],
)
def test_a_path_that_looks_like_a_probe_does_not_pass(path):
    assert make_client(api_key=KEYS).get(path).status_code == 401


@pytest.mark.parametrize(("path", "status"), [("/api/health", 200), ("/api/version", 401)])
def test_the_root_path_opens_nothing(path, status):
    assert make_client(api_key=KEYS, root_path="/api").get(path).status_code == status


def test_a_preflight_of_a_browser_needs_no_key():
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    response = make_client(api_key=KEYS).options("/v1/completions", headers=headers)
    assert response.status_code == 200


def test_the_anthropic_routes_have_their_own_body():
    response = make_client(api_key=KEYS).post("/v1/messages", json={})
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"


def test_without_keys_everyone_is_served():
    assert make_client().get("/version").status_code == 200


def test_no_log_of_the_arguments_shows_a_key():
    assert "first-key" not in repr(ServerArgs(api_key=KEYS))
