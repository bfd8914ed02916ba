"""Test client libraries that programs use against one server; each uses the API differently."""

import json
from typing import Any

import pytest
from pydantic import BaseModel, Field

from tests.e2e.server import KEY

pytestmark = [
    pytest.mark.e2e,
    # Ignore warnings that the client libraries cause themselves.
    pytest.mark.filterwarnings("ignore"),
]

NUM_TOKENS = 6
MESSAGES = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": "def add(a, b):"},
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "maxLength": 8}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}


class Place(BaseModel):
    """The fields of structured answers. They are short, so that a small model finishes them."""

    name: str = Field(max_length=8)
    size: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def server(chat_server):
    return chat_server


@pytest.fixture(scope="module")
def url(server):
    return f"{server.url}/v1"


@pytest.fixture(scope="module")
def model(server):
    status, _, body = server.request("GET", "/v1/models")
    assert status == 200
    return json.loads(body)["data"][0]["id"]


@pytest.fixture(scope="module")
def wanted(url, model):
    """Return the greedy answer that the official client gets; every other library must show the
    same.
    """
    import openai

    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        answer = client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=NUM_TOKENS, temperature=0
        )
    text = answer.choices[0].message.content
    assert text and answer.usage.completion_tokens == NUM_TOKENS
    return text


def test_anthropic(server, model, wanted):
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        asked: dict[str, Any] = {
            "model": model,
            "system": MESSAGES[0]["content"],
            "messages": MESSAGES[1:],
            "max_tokens": NUM_TOKENS,
            "extra_body": {"temperature": 0},  # the client has no argument for the temperature
        }
        answer = client.messages.create(**asked)
        assert answer.content[0].text == wanted
        assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", NUM_TOKENS)
        with client.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == wanted
        tool = WEATHER["function"]
        called = client.messages.create(
            **asked | {"max_tokens": 64},
            tools=[{"name": tool["name"], "input_schema": tool["parameters"]}],
            tool_choice={"type": "tool", "name": "weather"},
        )
        (use,) = [block for block in called.content if block.type == "tool_use"]
        assert use.name == "weather" and isinstance(use.input["place"], str)
        # The tool runner of the client first sends a request to create a thread on the server.
        schema = {"name": "weather", "input_schema": tool["parameters"]}
        last = client.beta.messages.tool_runner(**asked, tools=[schema], max_iterations=1)
        assert last.until_done().content[0].text == wanted


# Exhaustive: LiteLLM sends what the OpenAI client sends, which other tests check.
@pytest.mark.exhaustive
def test_litellm(url, model, wanted, monkeypatch):
    # Use the price list of the package, not one from the network.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    asked: dict[str, Any] = {
        "model": f"hosted_vllm/{model}",
        "api_base": url,
        "api_key": KEY,
        "messages": MESSAGES,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "num_retries": 0,
    }
    answer = litellm.completion(**asked)
    assert answer.choices[0].message.content == wanted
    assert answer.usage.completion_tokens == NUM_TOKENS
    parts = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == wanted
    assert parts[-1].usage.completion_tokens == NUM_TOKENS
    # No tools here: for tools the library needs a package that it does not install.
    answer = litellm.completion(**asked | {"max_tokens": 64}, response_format=Place)
    assert Place.model_validate_json(answer.choices[0].message.content)
    with pytest.raises(litellm.exceptions.BadRequestError, match="temperature"):
        litellm.completion(**asked | {"temperature": -1})
    with pytest.raises(litellm.exceptions.ContextWindowExceededError):
        litellm.completion(**asked | {"max_tokens": 5000})


def test_langchain(url, model, wanted):
    langchain_openai = pytest.importorskip("langchain_openai")
    chat = langchain_openai.ChatOpenAI(
        base_url=url, api_key=KEY, model=model, max_tokens=NUM_TOKENS, temperature=0, max_retries=0
    )
    turns = [(m["role"], m["content"]) for m in MESSAGES]
    answer = chat.invoke(turns)
    assert answer.content == wanted
    assert answer.usage_metadata["output_tokens"] == NUM_TOKENS
    assert "".join(part.content for part in chat.stream(turns)) == wanted
    assert [a.content for a in chat.batch([turns, turns])] == [wanted, wanted]
    longer = chat.model_copy(update={"max_tokens": 64})
    place = longer.with_structured_output(Place, method="json_schema").invoke(turns)
    assert isinstance(place, Place)
    called = longer.bind_tools([WEATHER], tool_choice="weather").invoke(turns)
    assert isinstance(called.tool_calls[0]["args"]["place"], str)
    back = [
        *turns,
        called,
        {"role": "tool", "tool_call_id": called.tool_calls[0]["id"], "content": "rain"},
    ]
    assert isinstance(chat.invoke(back).content, str)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor(url, model, mode):
    instructor = pytest.importorskip("instructor")
    import openai

    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode[mode])
        asked: dict[str, Any] = {
            "model": model,
            "messages": MESSAGES,
            "max_tokens": 200,
            "temperature": 0,
            "max_retries": 0,
        }
        place = client.chat.completions.create(response_model=Place, **asked)
        assert isinstance(place, Place)
