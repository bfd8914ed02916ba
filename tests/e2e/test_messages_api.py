"""Test the Messages API of a live server with the official client."""

import time

import pytest

from tests.e2e.server import KEY

pytestmark = pytest.mark.e2e

USER = {"role": "user", "content": "import os\n"}
TOOL = {
    "name": "copy",
    "description": "copies",
    "input_schema": {
        "type": "object",
        "properties": {"deep": {"type": "boolean"}},
        "required": ["deep"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def server(chat_server):
    return chat_server


@pytest.fixture
def anthropic():
    """Import the client only in the process that needs it, because the import takes seconds."""
    return pytest.importorskip("anthropic")


@pytest.fixture
def client(server, anthropic):
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        yield client


def options(**fields):
    greedy = {"temperature": 0}  # the client has no argument for the temperature
    given = {"model": "", "messages": [USER], "max_tokens": 24, "extra_body": greedy}
    return {**given, **fields}


def test_the_streamed_message_is_the_unstreamed_one(client):
    whole = client.messages.create(**options())
    with client.messages.stream(**options()) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, whole.stop_reason) == ("max_tokens", "max_tokens")
    assert final.usage.output_tokens == whole.usage.output_tokens == 24
    numbers = [m.usage.input_tokens + m.usage.cache_read_input_tokens for m in (final, whole)]
    assert numbers[0] == numbers[1]
    counted = client.messages.count_tokens(model="", messages=[USER])
    assert counted.input_tokens == numbers[0]


def test_a_stop_sequence_ends_the_message(client):
    whole = client.messages.create(**options(max_tokens=200, stop_sequences=["\n"]))
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "\n")
    assert "\n" not in whole.content[0].text


@pytest.mark.parametrize(
    "choice",
    [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "copy"}],
)
def test_a_demanded_tool_is_called_and_its_result_goes_back(client, choice):
    given = options(tools=[TOOL], tool_choice=choice, max_tokens=400)
    whole = client.messages.create(**given)
    (call,) = whole.content[:1]
    assert (call.type, call.name, whole.stop_reason) == ("tool_use", "copy", "tool_use")
    assert isinstance(call.input["deep"], bool)
    with client.messages.stream(**given) as stream:
        assert stream.get_final_message().content[0].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
    turns = [
        USER,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result]},
    ]
    after = client.messages.create(**options(messages=turns))
    assert after.content[0].type == "text"


def test_a_client_that_leaves_a_stream_ends_its_request(client, server):
    with client.messages.stream(**options(max_tokens=1500)) as stream:
        next(iter(stream))
    end, load = time.monotonic() + 120, b""
    while load != b'{"server_load":0}' and time.monotonic() < end:
        load = server.request("GET", "/load", None, **{"x-api-key": KEY})[2]
    assert load == b'{"server_load":0}'


@pytest.mark.parametrize(
    ("fields", "error", "kind"),
    [
        ({"model": "other"}, "NotFoundError", "not_found_error"),
        ({"max_tokens": 4000}, "BadRequestError", "invalid_request_error"),
        ({"messages": []}, "BadRequestError", "invalid_request_error"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "BadRequestError",
            "invalid_request_error",
        ),
    ],
)
def test_a_bad_request_is_an_exception_of_the_client(client, anthropic, fields, error, kind):
    with pytest.raises(getattr(anthropic, error)) as caught:
        client.messages.create(**options(**fields))
    assert caught.value.body["error"]["type"] == kind
