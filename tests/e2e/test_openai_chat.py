"""Test a live server with the bundled model through the official client."""

import asyncio
import json
import threading
import time

import openai
import pytest

pytestmark = pytest.mark.e2e

MESSAGES = [{"role": "user", "content": "def add(a, b):"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "maxLength": 5}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def server(chat_server):
    return chat_server


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        yield client


@pytest.fixture
def model(server):
    return server.get_json("/v1/models")["data"][0]["id"]


def is_idle(server, seconds=120.0):
    """Return whether all requests finish in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if server.metric("vllm:num_requests_running") == 0:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("options", [{}, {"n": 2, "temperature": 1.0, "seed": 3}, {"stop": [")"]}])
def test_streamed_chat_equals_whole_chat(client, model, options):
    wanted = {"model": model, "messages": MESSAGES, "max_tokens": 24, "temperature": 0, **options}
    whole = client.chat.completions.create(**wanted)
    texts, reasons = {}, {}
    stream = client.chat.completions.create(
        **wanted, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            reasons[choice.index] = choice.finish_reason
        usage = chunk.usage
    assert texts == {c.index: c.message.content for c in whole.choices}
    assert reasons == {c.index: c.finish_reason for c in whole.choices}
    assert usage == whole.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("options", [{}, {"echo": True, "logprobs": 2}, {"n": 2, "seed": 1}])
def test_streamed_completion_equals_whole_completion(client, model, options):
    temperature = 1.0 if "n" in options else 0.0
    wanted = {"model": model, "prompt": ["import os", "x ="], "max_tokens": 16, **options}
    whole = client.completions.create(**wanted, temperature=temperature)
    texts = {}
    for chunk in client.completions.create(**wanted, temperature=temperature, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {c.index: c.text for c in whole.choices}
    for choice in whole.choices:
        if choice.logprobs is not None:
            pairs = zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
            assert all(choice.text[at:].startswith(t) for t, at in list(pairs)[1:] if "�" not in t)


def test_an_echo_scores_a_prompt(client, model):
    wanted = {"model": model, "prompt": "import os\nimport sys", "echo": True, "logprobs": 1}
    choice = client.completions.create(**wanted, max_tokens=0).choices[0]
    assert choice.text == "import os\nimport sys"
    first, *others = choice.logprobs.token_logprobs
    assert first is None
    assert all(value <= 0 for value in others)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_forced_tools_are_called_with_arguments_of_their_schema(client, model, choice):
    wanted = {"model": model, "messages": MESSAGES, "tools": [TOOL], "tool_choice": choice}
    wanted |= {"max_tokens": 200, "temperature": 0, "parallel_tool_calls": False}
    (call,) = client.chat.completions.create(**wanted).choices[0].message.tool_calls
    assert call.function.name == "look"
    assert list(json.loads(call.function.arguments)) == ["at"]
    streamed = ""
    for chunk in client.chat.completions.create(**wanted, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            streamed += delta.function.arguments or ""
    assert streamed == call.function.arguments


def test_beams_and_the_best_of_several(client, model):
    wanted = {"model": model, "prompt": "import os", "max_tokens": 5, "n": 2}
    beams = client.completions.create(**wanted, extra_body={"use_beam_search": True})
    assert len({c.text for c in beams.choices}) == 2
    best = client.completions.create(**wanted, best_of=4, temperature=1.0)
    assert [c.index for c in best.choices] == [0, 1]
    assert best.usage.completion_tokens > 10


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"model": "x"}, openai.NotFoundError, "does not exist"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "maximum context length is 2048 tokens"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"seed": 2**70}, openai.BadRequestError, "seed must be at most"),
    ],
)
def test_errors_are_those_the_client_knows(client, model, fields, kind, text):
    with pytest.raises(kind, match=text):
        client.chat.completions.create(**{"model": model, "messages": MESSAGES, **fields})


def test_requests_with_one_id_run_at_the_same_time(client, model, server):
    answers = []

    def complete() -> None:
        answers.append(
            client.completions.create(
                model=model,
                prompt="x",
                max_tokens=8,
                extra_body={"ignore_eos": True},
                extra_headers={"X-Request-Id": "mine"},
            )
        )

    server.wait_until_idle()
    core, threads = server.engine_process(), [threading.Thread(target=complete) for _ in range(2)]
    core.suspend()  # both requests are in the server before one of them ends
    try:
        for thread in threads:
            thread.start()
        while json.loads(server.request("GET", "/load")[2])["server_load"] < 2:
            time.sleep(0.01)
    finally:
        core.resume()
        for thread in threads:
            thread.join(300)
    assert [answer.id for answer in answers] == ["cmpl-mine"] * 2
    assert [answer.usage.completion_tokens for answer in answers] == [8, 8]


def test_clients_that_leave_free_their_requests(server, model):
    async def leave() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="-", max_retries=0
        ) as client:

            async def one(is_stream: bool) -> None:
                await client.completions.create(
                    model=model,
                    prompt="x",
                    max_tokens=400,
                    timeout=0.1,
                    stream=is_stream,
                    extra_body={"ignore_eos": True},
                )

            await asyncio.gather(*(one(i % 2 == 0) for i in range(20)), return_exceptions=True)

    asyncio.run(leave())
    assert is_idle(server)


def test_a_template_without_end_stops_nobody_else(client, model, server):
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    found = []

    def ask() -> None:
        wanted = {"model": model, "messages": MESSAGES, "extra_body": {"chat_template": endless}}
        try:
            client.chat.completions.create(**wanted)
        except openai.BadRequestError as error:
            found.append(error)

    # A template has two seconds to run, which a slow machine may exceed: try several times.
    for _ in range(5):
        thread = threading.Thread(target=ask)
        thread.start()
        client.completions.create(model=model, prompt="x", max_tokens=2)
        is_rendering = thread.is_alive()
        thread.join(300)
        if is_rendering:
            break
    assert is_rendering
    assert "rendering took more than" in str(found[0])
