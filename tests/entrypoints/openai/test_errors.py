"""Test that every exception gives the right body and status."""

import functools
import json

import pytest
from fastapi import APIRouter
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from tests.entrypoints.openai.fakes import client_of
from vllm.entrypoints.http.errors import GenerationError, error_events
from vllm.entrypoints.http.sse import ClientDisconnected
from vllm.entrypoints.openai.protocol.base import RequestBody
from vllm.errors import (
    CapacityError,
    EngineDeadError,
    EngineStoppedError,
    NotFoundError,
    PromptTooLongError,
    RequestError,
    RequestTimeoutError,
)

CASES = [
    (RequestError("no", param="n"), 400, "invalid_request_error", "n", None),
    (PromptTooLongError(5, 4), 400, "invalid_request_error", "prompt", "context_length_exceeded"),
    (
        NotFoundError("no", param="model", code="model_not_found"),
        *(404, "not_found_error", "model", "model_not_found"),
    ),
    (CapacityError("no"), 400, "invalid_request_error", None, None),
    (CapacityError("no", status=409), 409, "conflict_error", None, None),
    (CapacityError("no", status=503), 503, "service_unavailable_error", None, None),
    (RequestTimeoutError("no"), 504, "timeout_error", None, None),
    (EngineDeadError("no"), 500, "server_error", None, "engine_dead"),
    (EngineStoppedError("no"), 503, "service_unavailable_error", None, None),
    (GenerationError("no"), 500, "server_error", None, "request_failed"),
    (HTTPException(405, "no"), 405, "invalid_request_error", None, None),
    (HTTPException(429, "no"), 429, "rate_limit_error", None, None),
    (RuntimeError("secret detail"), 500, "server_error", None, "internal_error"),
    (RequestError("half a pair: \ud800"), 400, "invalid_request_error", None, None),
]


class Body(RequestBody):
    """The body of a request."""

    n: int = 1
    name: str = ""


def routes_that_raise(error) -> APIRouter:
    router = APIRouter()

    @router.post("/fail")
    async def fail(body: Body) -> None:
        raise error

    return router


@pytest.mark.parametrize(("error", "status", "kind", "param", "code"), CASES, ids=str)
def test_an_exception_becomes_a_body_of_the_api(error, status, kind, param, code):
    with client_of(None, routes_that_raise(error)) as client:
        response = client.post("/fail", json={})
    assert list(response.json()) == ["error"]
    told = response.json()["error"]
    assert list(told) == ["message", "type", "param", "code"]
    assert (response.status_code, told["type"], told["param"], told["code"]) == (
        *(status, kind, param, code),
    )
    assert "secret" not in told["message"]
    assert ("retry-after" in response.headers) == (status == 503)


PICTURE = "iVBORw0KGgoAAAANSUhEUgAAADAAAAAoCAIAAAA35e4mAAABS0lEQVR4nO2YLUsEURSGfY4rqGVN20QL"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (f"url must be text, got {{'url': 'data:image/png;base64,{PICTURE[:30]}'}}", "...'}"),
        (f'n must be an integer, got "DATA:;BASE64,{PICTURE}"', 'got "DATA:;BASE64,..."'),
        (f"type must be text, got '{PICTURE}", "got '..."),
        (f"no file has the hash {'0123abcd' * 8}", "hash 0123abcd0123"),
        ("no folder /models/" + "Llama/" * 12, "/Llama/Llama/"),
    ],
)
def test_an_error_quotes_no_content_of_media(message, shown):
    with client_of(None, routes_that_raise(RequestError(message))) as client:
        told = client.post("/fail", json={}).json()["error"]["message"]
    assert shown in told and PICTURE[:9] not in told


@pytest.mark.parametrize(
    ("content", "param", "text"),
    [
        (b'{"n": "x"}', "n", 'n must be an integer, got "x"'),
        (b'{"n": 1', None, "the body is not JSON"),
        (b'{"other": {"a": [NaN]}}', "other", "NaN or an infinite number"),
        (b'{"n": 1e999}', "n", "NaN or an infinite number"),
        (b'{"other": ' + b"[" * 5000 + b"]" * 5000 + b"}", None, ""),
        (b'{"n": ' + b"9" * 5000 + b"}", None, "parsing the body"),
        (b"\xff\xfe", None, ""),
        (b"[1, 2]", None, ""),
        (b"", None, "the request has no body"),
    ],
)
def test_a_body_that_is_wrong_is_400_and_names_the_field(content, param, text):
    with client_of(None, routes_that_raise(RuntimeError())) as client:
        headers = {"content-type": "application/json"}
        response = client.post("/fail", content=content, headers=headers)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert text in error["message"]
    assert param is None or error["param"] == param
    assert len(error["message"]) < 5000


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (r'"cut \ud83d"', "cut \ufffd"),
        (r'{"a": [{"\udc00b": "\ud83d\ude00"}, 1]}', {"a": [{"\ufffdb": "\U0001f600"}, 1]}),
    ],
)
def test_half_of_a_surrogate_pair_is_replaced(given, expected):
    body = Body.model_validate(json.loads(f'{{"other": {given}, "\\ud800": 1}}'))
    assert body.model_extra == {"other": expected, "\ufffd": 1}


def test_what_is_nested_too_deeply_is_refused_also_with_half_of_a_pair():
    deep = functools.reduce(lambda inner, _: [inner], range(5000), "\ud800")
    for body in ({"other": deep}, {"name": "\ud800", "other": deep}):
        with pytest.raises(ValidationError, match="nested too deeply"):
            Body.model_validate(body)


def test_a_client_that_has_left_gets_no_body():
    with client_of(None, routes_that_raise(ClientDisconnected())) as client:
        response = client.post("/fail", json={})
    assert (response.status_code, response.content) == (499, b"")


def test_a_stream_that_fails_ends_with_the_error_and_done():
    events = error_events(RequestError("no", param="n")).decode().split("\n\n")
    assert json.loads(events[0].removeprefix("data: ")) == {
        "error": {
            "message": "no",
            "type": "invalid_request_error",
            "param": "n",
            "code": None,
        }
    }
    assert events[1:] == ["data: [DONE]", ""]
