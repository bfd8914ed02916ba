"""Test the application as a whole: answers for unknown routes, and the middleware of all routes."""

import asyncio
import json
import logging
import sys

import pytest
from starlette.testclient import TestClient

from tests.entrypoints.openai.server_fakes import make_app, make_client
from vllm.entrypoints.http.body_route import BodyRoute
from vllm.entrypoints.middleware.request_id import is_safe
from vllm.errors import ConfigError
from vllm.utils.background_work import TIME_SLICE_S
from vllm.version import __version__


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/nope", 404, "not_found_error"),
        ("DELETE", "/version", 405, "invalid_request_error"),
        ("HEAD", "/nope", 404, None),
        ("HEAD", "/v1/chat/completions", 405, None),
        ("OPTIONS", "/nope", 404, "not_found_error"),
        ("GET", "/fail", 500, "server_error"),
    ],
)
def test_an_error_has_the_body_of_the_api(method, path, status, kind):
    response = make_client().request(method, path)
    body = response.json()["error"]["type"] if response.content else None
    assert (response.status_code, body) == (status, kind)
    assert "sesame" not in response.text


MESSAGE_ERROR = "error", "not_found_error"
OTHER_ERROR = None, "not_found_error"


@pytest.mark.parametrize(
    ("method", "path", "expected", "body"),
    [
        ("POST", "/v1/chat/completion", "POST /v1/chat/completions?", OTHER_ERROR),
        ("POST", "/chat/completions", "POST /v1/chat/completions?", OTHER_ERROR),
        ("POST", "/v1/v1/chat/completions", "POST /v1/chat/completions?", OTHER_ERROR),
        ("POST", "/v1/chat/completions/v1/messages", "POST /v1/messages?", MESSAGE_ERROR),
        ("POST", "/v1/message", "POST /v1/messages?", MESSAGE_ERROR),
        ("POST", "/v1/messages/count_token", "POST /v1/messages/count_tokens?", MESSAGE_ERROR),
        ("GET", "/model", "GET /v1/models?", OTHER_ERROR),
        ("POST", "/v1/respones", "POST /v1/responses?", OTHER_ERROR),
        ("GET", "/nothing/like/it", "GET /docs shows all routes", OTHER_ERROR),
        ("POST", "/props", "belongs to the server of llama.cpp", OTHER_ERROR),
        ("POST", "/infill", "send prompt and suffix to POST /v1/completions", OTHER_ERROR),
        ("POST", "/v1/fim/completions", "send prompt and suffix to POST", OTHER_ERROR),
        ("POST", "/v1/engines/m/completions", "did you mean POST /v1/completions?", OTHER_ERROR),
        (
            "POST",
            "/openai/deployments/m/chat/completions",
            "did you mean POST /v1/chat/completions?",
            OTHER_ERROR,
        ),
        ("POST", "/v1/v1/completions", "end with /v1, not with /v1/v1", OTHER_ERROR),
        ("POST", "/completions", "base URL of the client end with /v1", OTHER_ERROR),
        ("POST", "/anthropic/v1/messages", "end without /anthropic,", MESSAGE_ERROR),
        (
            "POST",
            "/v1/conversations",
            "not offer /v1/conversations: POST /v1/responses",
            OTHER_ERROR,
        ),
        ("POST", "/conversations/c/items", "not offer /v1/conversations: POST /v1/", OTHER_ERROR),
        ("POST", "/v1/messages/batches", "not offer /v1/messages/batches: send the", MESSAGE_ERROR),
        ("GET", "/v1/batches/b", "not offer /v1/batches: run `vllm run-batch`", OTHER_ERROR),
        ("POST", "/v1/images/edits", "this server does not offer /v1/images", OTHER_ERROR),
        ("GET", "/a%0Ab", "GET /docs shows all routes", OTHER_ERROR),
        ("GET", "/" + "x" * 9999, "GET /docs shows all routes", OTHER_ERROR),
    ],
)
def test_an_unknown_path_is_named_with_what_is_near(method, path, expected, body):
    headers = {"Content-Type": "text/plain"}
    answer = make_client().request(method, path, content="{}", headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, answer.json().get("type"), error["type"]) == (404, *body)
    assert error["message"].startswith(f"there is no route {method} {path[:200]}; ")
    assert expected in error["message"] and "\n" not in error["message"]


def test_a_service_whose_path_looks_like_an_id_is_named():
    answer = make_client().post("/v1/responses/compact", json={})
    assert answer.status_code == 404
    assert "does not offer /v1/responses/compact: send" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "methods"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/responses/resp_1", "DELETE, GET"),
        ("GET", "/v1/messages", "POST"),
    ],
)
def test_a_wrong_method_is_named_with_those_of_the_path(method, path, methods):
    answer = make_client().request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, methods)
    message = f"there is no route {method} {path}; this path takes {methods}"
    assert answer.json()["error"]["message"] == message


@pytest.mark.parametrize("path", ["/api/tags", "/api/chat", "/api/show"])
def test_clients_of_ollama_get_errors_that_they_can_show(path):
    answer = make_client().post(path, json={})
    assert answer.status_code == 404
    assert "belongs to the API of Ollama. This server has OpenAI's" in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "plain"),
    [
        *((path, "/version") for path in ("/version/", "//version", "/version//", "//version/")),
        *((path, "/v1/models/m") for path in ("/v1//models/m", "//v1///models//m/")),
    ],
)
def test_a_slash_too_many_does_no_harm(path, plain):
    client = make_client(root_path="/behind")
    for prefix in ("", "/behind"):
        answer = client.get(f"http://testserver{prefix}{path}")
        assert answer.json() == client.get(plain).json(), path
    guarded = make_client(api_key=("key",))
    assert guarded.get(f"http://testserver{path}").status_code == 401


@pytest.mark.parametrize("path", ["/", "/version", "/livez", "/v1/models/"])
def test_head_is_get_without_the_body(path):
    client = make_client()
    head, full = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (full.status_code, b"")
    assert head.headers["content-length"] == full.headers["content-length"]


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/version", "GET, HEAD, OPTIONS"),
        ("/v1/chat/completions", "OPTIONS, POST"),
        ("/v1/responses/resp_1/", "DELETE, GET, HEAD, OPTIONS"),
        ("/v1/models/a/b", "GET, HEAD, OPTIONS"),
    ],
)
def test_options_lists_the_methods_of_a_path(path, methods):
    answer = make_client(api_key=("key",)).options(path)
    assert (answer.status_code, answer.headers["allow"], answer.content) == (204, methods, b"")


@pytest.mark.parametrize("is_allowed", [False, True])
def test_a_page_of_the_internet_may_call_a_private_server_if_it_is_let(is_allowed):
    headers = {
        "Origin": "https://page.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Private-Network": "true",
    }
    client = make_client(allow_private_network=is_allowed)
    answer = client.options("/v1/chat/completions", headers=headers)
    assert answer.status_code == (200 if is_allowed else 400)
    allowed = answer.headers.get("access-control-allow-private-network")
    assert allowed == ("true" if is_allowed else None)


def test_the_version_is_that_of_the_package():
    assert make_client().get("/version").json() == {"version": __version__}


def test_openapi_and_docs_can_be_turned_off():
    client = make_client()
    assert "/livez" in client.get("/openapi.json").json()["paths"]
    assert "openapi.json" in client.get("/docs").text
    client = make_client(disable_fastapi_docs=True)
    assert [client.get(path).status_code for path in ("/openapi.json", "/docs")] == [404, 404]


def test_the_description_is_made_on_demand_and_beside_the_event_loop(monkeypatch):
    app, _ = make_app(root_path="/behind")
    places = []

    def describe():
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            places.append(sys.getswitchinterval())
        return {"paths": {}}

    monkeypatch.setattr(app, "openapi", describe)
    answer = TestClient(app).get("/openapi.json").json()
    assert answer == {"paths": {}, "servers": [{"url": "/behind"}]}
    assert places == [TIME_SLICE_S]


def test_the_description_tells_which_answers_may_be_streams_and_which_are_empty():
    api = make_client().get("/openapi.json").json()
    streamed = set()
    for path, methods in api["paths"].items():
        for route in methods.values():
            form = route.get("requestBody", {}).get("content", {}).get("application/json", {})
            name = form.get("schema", {}).get("$ref", "").rpartition("/")[2]
            fields = api["components"]["schemas"].get(name, {}).get("properties", {})
            answer = route["responses"].get("200", {}).get("content", {})
            # A count takes the body of a response, but is no stream.
            if "stream" in fields and not path.endswith("/input_tokens"):
                assert {"application/json", "text/event-stream"} <= answer.keys(), path
                streamed.add(path)
            if path in ("/health", "/ping"):
                assert not answer
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses"} <= streamed


def test_docs_load_nothing_from_other_hosts():
    page = make_client().get("/docs").text
    assert "http:" not in page and "https:" not in page and 'src="' not in page


@pytest.mark.parametrize("path", ["/v1/version", "/version"])
def test_routes_are_found_with_and_without_the_root_path(path):
    assert make_client(root_path="/v1").get(path).status_code == 200


def test_browsers_of_named_origins_may_call():
    client = make_client(allowed_origins=("https://a.example",))
    for origin, allowed in (
        ("https://a.example", "https://a.example"),
        ("https://b.example", None),
    ):
        response = client.get("/version", headers={"Origin": origin})
        assert response.headers.get("access-control-allow-origin") == allowed


def test_an_error_of_a_route_has_the_headers_for_browsers_too():
    response = make_client().get("/fail", headers={"Origin": "https://a.example"})
    assert response.headers["access-control-allow-origin"] == "*"


def test_a_request_id_is_sent_back():
    client = make_client(enable_request_id_headers=True)
    response = client.get("/echo", headers={"X-Request-Id": "job-7"})
    assert (response.headers["x-request-id"], response.json()["id"]) == ("job-7", "job-7")
    assert "x-request-id" not in make_client().get("/echo", headers={"X-Request-Id": "a"}).headers


@pytest.mark.parametrize("given", [None, "", "a b", "x" * 129, "a\tb", "\xe9"])
def test_a_request_id_that_is_missing_or_unsafe_is_replaced(given):
    headers = {} if given is None else {"X-Request-Id": given.encode("latin-1")}
    client = make_client(enable_request_id_headers=True)
    response = client.get("/echo", headers=headers)
    made = response.headers["x-request-id"]
    assert made != given and is_safe(made) and response.json()["id"] == made


def test_every_response_has_a_request_id():
    client = make_client(enable_request_id_headers=True, api_key=("k",))
    for path, status in (("/version", 401), ("/health", 200)):
        response = client.get(path, headers={"X-Request-Id": "mine"})
        assert (response.status_code, response.headers["x-request-id"]) == (status, "mine")


class AddHeader:
    """ASGI middleware of a user, which adds a header."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def send_more(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-added", b"class")]
            await send(message)

        await self.app(scope, receive, send_more)


async def add_header(request, call_next):
    response = await call_next(request)
    response.headers["x-added"] = "function"
    return response


@pytest.mark.parametrize(("name", "added"), [("AddHeader", "class"), ("add_header", "function")])
def test_middleware_of_the_user_surrounds_the_routes(name, added):
    client = make_client(middleware=(f"{__name__}.{name}",))
    assert client.get("/version").headers["x-added"] == added


@pytest.mark.parametrize("name", ["nothing", "no.such.module.Class", f"{__name__}.pytest"])
def test_middleware_that_is_none_is_refused(name):
    with pytest.raises(ConfigError, match="middleware"):
        make_client(middleware=(name,))


class Records(logging.Handler):
    """A log handler that stores the records."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


def lines_of(module, method, path, body=None, **settings):
    logger, kept = logging.getLogger(f"vllm.entrypoints.middleware.{module}"), Records()
    logger.addHandler(kept)
    try:
        make_client(**settings).request(method, path, json=body)
    finally:
        logger.removeHandler(kept)
    return [(record.getMessage(), record.fields) for record in kept.records]


def access_lines(path, **settings):
    return lines_of("access_log", "GET", path, **settings)


def test_a_request_is_one_line_in_the_log():
    ((line, fields),) = access_lines("/nope?prompt=secret%0aINFO")
    assert '"GET /nope" 404 in ' in line and "secret" not in line
    assert json.dumps(fields) and fields["status"] == 404 and fields["path"] == "/nope"


def test_a_path_cannot_forge_a_line():
    ((line, _),) = access_lines("/a%0aINFO%20b%1b[2J")
    assert line.isprintable() and "\n" not in line


@pytest.mark.parametrize(
    ("path", "settings"),
    [("/livez", {}), ("/health", {}), ("/nope", {"disable_uvicorn_access_log": True})],
)
def test_probes_and_a_silenced_server_log_nothing(path, settings):
    assert access_lines(path, **settings) == []


def test_requests_in_progress_are_counted_to_their_end():
    client = make_client()
    client.get("/echo")
    client.get("/fail")
    assert client.get("/load").json() == {"server_load": 0}


def request_lines(body, **settings):
    return [line for line, _ in lines_of("request_log", "POST", "/echo", body, **settings)]


def test_requests_are_logged_only_when_asked_for():
    body = {"prompt": "line\nbreak", "ids": [1, 2, 3]}
    assert request_lines(body) == []
    (line,) = request_lines(body, log_requests=True)
    assert line == 'request - to /echo: {"prompt": "line\\nbreak", "ids": [1, 2, 3]}'


def test_long_prompts_are_cut_in_the_log():
    body = {"messages": [{"content": "abcdef"}], "ids": [1, 2, 3, 4], "n": 1}
    (line,) = request_lines(body, log_requests=True, max_log_len=3)
    assert line.endswith('{"messages": [{"content": "abc..."}], "ids": [1, 2, 3, "..."], "n": 1}')


@pytest.mark.parametrize("root_path", ["", "/base"])
def test_the_same_errors_come_with_and_without_the_search_for_a_route(root_path):
    """POST requests with a body go directly to their route; FastAPI handles all others."""
    client = make_client(root_path=root_path)
    json_type = {"content-type": "application/json"}

    def status_of(method: str, path: str, **request) -> tuple[int, str]:
        response = client.request(method, path, **request)
        return response.status_code, response.json()["error"]["message"]

    # A request without a body.
    assert status_of("POST", "/v1/completions", headers=json_type)[0] == 400
    empty = iter([b""])  # a chunked request whose body is empty
    status, message = status_of("POST", "/v1/completions", headers=json_type, content=empty)
    assert status == 400 and "body" in message
    assert status_of("POST", "/v1/completions", json={"prompt": []})[0] == 400
    assert status_of("POST", "/v1/completions", headers=json_type, content=b"{")[0] == 400
    assert status_of("GET", "/v1/completions")[0] == 405
    assert status_of("POST", "/v1/completions/", json={"prompt": []})[0] == 400


def test_a_body_goes_to_its_route_without_a_search(monkeypatch):
    client = make_client()
    monkeypatch.setattr(BodyRoute, "matches", lambda *_: pytest.fail("a search"))
    response = client.post("/v1/completions", json={"prompt": []})
    assert response.status_code == 400 and "prompt" in response.json()["error"]["message"]
