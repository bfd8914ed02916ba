"""Test how official clients handle a stream that fails in the middle: their loop raises an error
with the reason.
"""

import re
from dataclasses import dataclass

import httpx
import openai
import pytest

from tests.entrypoints.openai.observed_server import served
from tests.entrypoints.openai.scripted_engine import ScriptedEngine, make_app
from vllm.entrypoints.api_server import router as legacy_router
from vllm.errors import EngineDeadError, RequestTimeoutError

USER = [{"role": "user", "content": "hi"}]


@dataclass
class Failure:
    """A failure after the first piece, and the message that clients get."""

    status: int
    code: str | None
    message: str
    error: Exception | None = None
    """None: the engine ends the request with the message."""


FAILURES = {
    "the engine dies": Failure(
        500,
        "engine_dead",
        "the engine process has ended (signal 9)",
        EngineDeadError("the engine process has ended (signal 9)"),
    ),
    "the request fails": Failure(500, "request_failed", "its logits are not finite"),
    "the request takes too long": Failure(
        504, None, "took longer than 3 s", RequestTimeoutError("took longer than 3 s")
    ),
    "something unforeseen": Failure(
        500,
        "internal_error",
        "the server failed to answer this request; see its log",
        KeyError("secret detail"),
    ),
}


@pytest.fixture(scope="module")
def engine():
    return ScriptedEngine("one", "two")


@pytest.fixture(scope="module")
def url(engine):
    app = make_app(engine)
    app.include_router(legacy_router)
    with served(app) as url:
        yield url


@pytest.fixture(params=FAILURES)
def failure(request, engine):
    found = FAILURES[request.param]
    engine.error, engine.error_at = found.error, 1
    if found.error is None:
        engine.core.error_after = 1, found.message
    yield found
    engine.error = engine.core.error_after = None


@pytest.fixture(scope="module")
def openai_client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def read(stream, expected=openai.APIError):
    """Return what a loop over a stream got before it raised an error, and the error."""
    got = []
    with pytest.raises(expected) as raised:
        for event in stream:
            got.append(event)
    return got, raised.value


def check_openai_error(error, failure):
    assert error.message == failure.message
    kind = "server_error" if failure.status == 500 else "timeout_error"
    assert (error.type, error.code, error.param) == (kind, failure.code, None)


def test_the_loop_over_a_chat_raises(openai_client, failure):
    stream = openai_client.chat.completions.create(model="", messages=USER, stream=True)
    chunks, error = read(stream)
    assert "".join(chunk.choices[0].delta.content for chunk in chunks).startswith("one")
    check_openai_error(error, failure)


def test_the_loop_over_a_completion_raises(openai_client, failure):
    chunks, error = read(openai_client.completions.create(model="", prompt="hi", stream=True))
    assert chunks[0].choices[0].text == "one"
    check_openai_error(error, failure)


@pytest.mark.parametrize("background", [False, True])
def test_the_loop_over_a_response_raises_after_the_failed_response(
    openai_client, failure, background
):
    stream = openai_client.responses.create(
        model="", input="hi", stream=True, background=background
    )
    events, error = read(stream)
    check_openai_error(error, failure)
    failed = events[-1]
    assert (failed.type, failed.response.status) == ("response.failed", "failed")
    assert failed.response.error.message == failure.message
    assert failed.response.output[0].content[0].text.startswith("one")
    stored = openai_client.responses.retrieve(failed.response.id)
    assert stored.error == failed.response.error
    if background:
        _, again = read(openai_client.responses.retrieve(stored.id, stream=True))
        check_openai_error(again, failure)


def test_the_helper_of_the_responses_client_raises(openai_client, failure):
    with openai_client.responses.stream(model="", input="hi") as stream:
        _, error = read(stream)
    check_openai_error(error, failure)


def test_the_loop_over_a_message_raises(url, failure):
    import anthropic  # only this test needs it, and its import is slow

    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        events, error = read(
            client.messages.create(model="", messages=USER, max_tokens=9, stream=True),
            anthropic.APIError,
        )
        with client.messages.stream(model="", messages=USER, max_tokens=9) as stream:
            _, again = read(stream, anthropic.APIError)
    assert next(e.delta.text for e in events if e.type == "content_block_delta") == "one"
    assert error.body == again.body
    detail = error.body["error"]
    assert detail["message"] == failure.message
    if failure.status == 500:
        assert (detail["type"], detail["code"]) == ("api_error", failure.code)
    else:
        assert detail["type"] == "timeout_error"


def test_the_events_of_the_wire_end_as_documented(url, failure):
    chat = httpx.post(
        f"{url}/v1/chat/completions", json={"messages": USER, "stream": True}, timeout=60
    ).text
    *_, error, done, rest = chat.split("\n\n")
    assert error.startswith('data: {"error":{"message":')
    assert (done, rest) == ("data: [DONE]", "")
    response = httpx.post(
        f"{url}/v1/responses", json={"input": "hi", "stream": True}, timeout=60
    ).text
    names = re.findall("^event: (.*)$", response, re.MULTILINE)
    assert names[-2:] == ["response.failed", "error"]
    assert "secret" not in chat + response


@pytest.mark.parametrize("stream", [False, True])
def test_the_old_route_does_not_hide_a_failure(url, failure, stream):
    answer = httpx.post(f"{url}/generate", json={"prompt": "hi", "stream": stream}, timeout=60)
    assert answer.status_code == (200 if stream else failure.status)
    last = answer.text.splitlines()[-1]
    assert failure.message in last and (failure.code or "timeout_error") in last
