"""Test POST /invocations: the keys of the body choose the route, which then answers as usual."""

import json
import re

import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.testclient import TestClient

from tests.entrypoints.openai.scripted_engine import ScriptedEngine
from tests.entrypoints.openai.scripted_engine import make_client as make_server_client
from vllm.entrypoints.http.errors import add_error_handlers
from vllm.entrypoints.openai.audio import serving as serving_audio
from vllm.entrypoints.openai.routes import (
    invocations as serving_invocations,
)
from vllm.entrypoints.openai.routes.invocations import find_target


class ChatBody(BaseModel):
    messages: list[str]


def make_client(root_path=""):
    app = FastAPI()
    app.include_router(serving_invocations.router)
    app.include_router(serving_audio.router)
    add_error_handlers(app)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request):
        return {"messages": body.messages, "path": request.url.path}

    return TestClient(app, root_path=root_path)


@pytest.mark.parametrize("root_path", ["", "/proxy"])
def test_the_route_gets_the_request_as_if_sent_there(root_path):
    answer = make_client(root_path).post(f"{root_path}/invocations", json={"messages": ["é"]})
    assert answer.status_code == 200
    assert answer.json() == {"messages": ["é"], "path": f"{root_path}/v1/chat/completions"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_is_answered_as_by_the_chat_route(stream):
    client = make_server_client(ScriptedEngine("Hel", "lo"))
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
    answers = [client.post(path, json=body) for path in ("/invocations", "/v1/chat/completions")]
    assert [answer.status_code for answer in answers] == [200, 200]
    texts = [re.sub(r'"(id|created)":[^,]*,', "", answer.text) for answer in answers]
    assert texts[0] == texts[1]
    assert "lo" in texts[0]


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"messages": "x"}, 400, "messages"),
        ({"prompt": "x"}, 404, "Not Found"),
        ({"foo": 1}, 400, "messages, prompt"),
        ([], 400, "JSON object"),
        ({"input": "x", "task": "dance"}, 400, "task"),
    ],
)
def test_errors_are_those_of_the_route_or_name_the_keys(body, status, text):
    answer = make_client().post("/invocations", json=body)
    assert answer.status_code == status
    assert text in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"messages": []}, "/v1/chat/completions"),
        ({"prompt": "a", "input": "b"}, "/v1/completions"),
        ({"input": "a"}, "/v1/embeddings"),
        ({"input": "a", "task": "classify"}, "/classify"),
        ({"input": "a", "task": "pooling"}, "/pooling"),
        ({"text_1": "a", "text_2": "b"}, "/v1/score"),
        ({"query": "a", "documents": []}, "/v1/rerank"),
    ],
)
def test_keys_choose_the_route(fields, path):
    assert find_target(json.dumps(fields).encode()) == path


def test_speech_is_refused_in_words():
    answer = make_client().post("/v1/audio/speech", json={"input": "Hello"})
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"
    assert "cannot generate speech" in answer.json()["error"]["message"]
