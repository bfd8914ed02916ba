"""Test the usage in every chunk of a stream: it begins at 0 and grows with each token."""

import pytest

from tests.engine.tokenizers_for_tests import byte_level
from tests.entrypoints.openai.fakes import client_of
from tests.entrypoints.openai.sse_reader import chunks_of
from tests.fake_core import FakeCoreLLM
from vllm.entrypoints.openai.chat.serving import router as chat_router
from vllm.entrypoints.openai.completion.serving import router as completion_router

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
EVERY_CHUNK = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
SCRIPT = byte_level()("def foo(x)", add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def post():
    engine = FakeCoreLLM(lambda request: SCRIPT)
    with client_of(engine, chat_router, completion_router) as client:

        def send(path, **body):
            response = client.post(path, json=body)
            assert response.status_code == 200, response.text
            return response

        yield send


CASES = {
    "chat": (CHAT, MESSAGES, 4),
    "chat, n = 3": (CHAT, {**MESSAGES, "n": 3}, 12),
    "chat with echo and logprobs": (CHAT, {**MESSAGES, "echo": True, "logprobs": True}, 4),
    "completion": (COMPLETION, {"prompt": "a b"}, 4),
    "completion, n = 3": (COMPLETION, {"prompt": "a b", "n": 3}, 12),
    "two prompts, n = 2": (COMPLETION, {"prompt": ["a b", "c"], "n": 2}, 16),
    "completion with echo": (COMPLETION, {"prompt": "a b", "echo": True}, 4),
    "echo with logprobs": (COMPLETION, {"prompt": "a b", "n": 2, "echo": True, "logprobs": 1}, 8),
}


@pytest.mark.parametrize(("path", "body", "num_output"), CASES.values(), ids=CASES)
def test_each_chunk_tells_the_tokens_up_to_it(post, path, body, num_output):
    body = {**body, "max_tokens": 4, "temperature": 0.5}
    whole = post(path, **body).json()["usage"]
    assert whole["completion_tokens"] == num_output
    *chunks, last = chunks_of(post(path, **body, **EVERY_CHUNK).text)
    assert (last["choices"], last["usage"]) == ([], whole)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    roles = [chunk for chunk in chunks if chunk["choices"][0].get("delta", {}).get("role")]
    assert len(roles) == (body.get("n", 1) if path == CHAT else 0)
    assert counts == [0] * len(roles) + list(range(1, num_output + 1))
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == whole["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_an_echo_alone_has_no_output_tokens(post):
    body = {"prompt": "a b", "echo": True, "max_tokens": 0}
    chunks = chunks_of(post(COMPLETION, **body, **EVERY_CHUNK).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 0]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": True}])
def test_without_being_asked_no_chunk_but_the_last_tells_usage(post, path, options):
    given = MESSAGES if path == CHAT else {"prompt": "a b"}
    body = {**given, "max_tokens": 2, "stream": True, "stream_options": options}
    chunks = chunks_of(post(path, **body).text)
    with_usage = [chunk.get("usage") is not None for chunk in chunks]
    is_last_told = options.get("include_usage", True)
    assert with_usage == [False] * (len(chunks) - 1) + [is_last_told]
