"""Test the Responses API of a live server with the official client."""

import json
import time

import openai
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.e2e

PROMPT = "import os\n"
TOOL = {
    "type": "function",
    "name": "copy",
    "description": "copies",
    "parameters": {
        "type": "object",
        "properties": {"deep": {"type": "boolean"}},
        "required": ["deep"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Answer(BaseModel):
    is_good: bool


@pytest.fixture
def server(chat_server):
    return chat_server


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    server.wait_until_idle()


def create(client, **fields):
    given = {"model": "", "input": PROMPT, "max_output_tokens": 24, "temperature": 0, **fields}
    return client.responses.create(**given)


def test_the_streamed_response_is_the_unstreamed_one(client):
    whole = create(client)
    events = list(create(client, stream=True))
    assert whole.output_text
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == (
        whole.output_text
    )
    final = events[-1].response
    assert final.output_text == whole.output_text
    assert (final.status, final.incomplete_details) == (whole.status, whole.incomplete_details)
    assert final.usage.output_tokens == whole.usage.output_tokens <= 24
    assert final.usage.input_tokens == whole.usage.input_tokens
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_the_streaming_helper_collects_the_response(client):
    given = {"model": "", "input": PROMPT, "temperature": 0, "max_output_tokens": 400}
    with client.responses.stream(**given, extra_body={"stop": ["\n\n"]}) as stream:
        texts = [e.snapshot for e in stream if e.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.status == "completed"
    assert texts[-1] == final.output_text


def test_a_schema_gives_a_parsed_answer(client):
    given = {"model": "", "input": PROMPT, "max_output_tokens": 400, "temperature": 0}
    parsed = client.responses.parse(**given, text_format=Answer)
    assert isinstance(parsed.output_parsed, Answer)
    with client.responses.stream(**given, text_format=Answer) as stream:
        stream.until_done()
        assert stream.get_final_response().output_parsed == parsed.output_parsed


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "copy"}])
def test_a_demanded_tool_is_called_and_its_output_goes_back(client, choice):
    given = {"tools": [TOOL], "tool_choice": choice, "max_output_tokens": 400}
    given["parallel_tool_calls"] = False
    whole = create(client, **given)
    (call,) = whole.output
    assert (call.type, call.name) == ("function_call", "copy")
    assert isinstance(json.loads(call.arguments)["deep"], bool)
    events = list(create(client, **given, stream=True))
    streamed = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(streamed) == call.arguments
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    follow = create(client, input=[output], previous_response_id=whole.id)
    assert follow.output[0].type == "message"
    items = list(client.responses.input_items.list(follow.id, order="asc"))
    assert [item.type for item in items][:2] == ["message", "function_call"]
    assert items[-1].output == "done"


def test_log_probabilities_are_parsed(client):
    response = create(client, top_logprobs=2, include=["message.output_text.logprobs"])
    logprobs = response.output[0].content[0].logprobs
    assert len(logprobs) == response.usage.output_tokens
    assert all(len(position.top_logprobs) == 2 for position in logprobs)
    assert "".join(position.token for position in logprobs).startswith(response.output_text)


def test_a_stored_response_is_continued_retrieved_and_deleted(client):
    first = create(client, instructions="be brief")
    second = create(client, input="and then?", previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.output_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError, match=second.id):
        client.responses.retrieve(second.id)


def wait_until_it_ends(client, response_id):
    end = time.monotonic() + 300
    while time.monotonic() < end:
        response = client.responses.retrieve(response_id)
        if response.status not in ("queued", "in_progress"):
            return response
        time.sleep(0.05)
    raise AssertionError(f"{response_id} is {response.status}")


def test_a_background_response_is_retrieved_when_it_has_ended(client):
    made = create(client, background=True)
    assert made.status == "queued"
    assert wait_until_it_ends(client, made.id).output_text == create(client).output_text


def test_a_background_response_is_cancelled(client, server):
    made = create(client, background=True, max_output_tokens=1500, extra_body={"stop": ["\0"]})
    assert client.responses.cancel(made.id).status == "cancelled"
    server.wait_until_idle()


def test_a_background_stream_is_taken_up_again(client):
    events = list(create(client, background=True, stream=True))
    again = list(client.responses.retrieve(events[0].response.id, stream=True, starting_after=4))
    assert [event.sequence_number for event in again] == list(range(5, len(events)))
    assert again[-1].response.output_text == events[-1].response.output_text


def test_a_client_that_leaves_a_stream_ends_its_request(client, server):
    stream = create(client, stream=True, max_output_tokens=1500)
    next(iter(stream))
    stream.close()
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"model": "other"}, openai.NotFoundError, "other"),
        ({"tool_choice": {"type": "web_search"}}, openai.BadRequestError, "web_search"),
        ({"max_output_tokens": 10**6}, openai.BadRequestError, "context length"),
        ({"previous_response_id": "resp_x"}, openai.NotFoundError, "resp_x"),
        ({"input": [{"role": "user", "content": 7}]}, openai.BadRequestError, r"input\[0\]"),
    ],
)
def test_a_bad_request_is_an_exception_of_the_client(client, fields, error, text):
    with pytest.raises(error, match=text):
        create(client, **fields)
