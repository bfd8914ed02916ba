"""Test results of tools with content that the model cannot read, over each API."""

import json

from tests.entrypoints.openai.scripted_engine import TEMPLATE, ScriptedEngine, make_client
from tests.loops import loop_over

PNG = "iVBORw0KGgo="
URL = f"data:image/png;base64,{PNG}"
NO_IMAGE = "[image left out: this model cannot read it]"
NO_FILE = "[file left out: this model cannot read it]"
USER = {"role": "user", "content": "u"}


def chat(result):
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    return {"messages": [*messages, {"role": "tool", "tool_call_id": "c", "content": result}]}


def responses(result):
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    return {"input": [USER, call, {**call, "type": "function_call_output", "output": result}]}


def messages(result):
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    block = {"type": "tool_result", "tool_use_id": "c", "content": result}
    turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [block]}]
    return {"messages": [USER, *turns], "max_tokens": 8}


APIS = {
    chat: "/v1/chat/completions",
    responses: "/v1/responses",
    messages: "/v1/messages",
}
SOURCE = {"type": "base64", "media_type": "image/png", "data": PNG}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}
TEXT_FILE = {"type": "base64", "media_type": "text/plain", "data": "aGk="}
NOTES = {"filename": "a.md", "file_data": "data:text/markdown;base64,aGk="}
BINARY = {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}
RESOURCE = {"type": "resource", "resource": {"uri": "a", "text": "T"}}
MCP_IMAGE = {"type": "image", "data": PNG, "mimeType": "image/png"}
INPUT_IMAGE = {"type": "input_image", "image_url": URL}


@loop_over(
    "api, result, seen",
    [
        (chat, [{"type": "text", "text": "t"}, {"type": "image_url", "image_url": URL}], "t"),
        (chat, [{"image_url": {"url": URL}}], NO_IMAGE),
        (chat, [{"type": "video_url", "video_url": {"url": "http://a"}}], "[video left out"),
        (chat, [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}], "[audio"),
        (chat, [MCP_IMAGE], NO_IMAGE),
        (chat, [RESOURCE], json.dumps(RESOURCE)),
        (chat, [{"type": "file", "file": {"file_data": "x"}}], NO_FILE),
        (chat, [{"type": "file", "file": NOTES}], "<tool>a.md\nhi<"),
        (chat, [{"type": "file", "file": BINARY}], NO_FILE),
        (chat, {"a": 1}, '{"a": 1}'),
        (responses, [INPUT_IMAGE], NO_IMAGE),
        (responses, [MCP_IMAGE], NO_IMAGE),
        (responses, [{"type": "input_file", "file_id": "f"}], NO_FILE),
        (responses, [{"type": "input_file", **NOTES}], "<tool>a.md\nhi<"),
        (responses, [RESOURCE], json.dumps(RESOURCE)),
        (responses, [1, {"a": 2}], '[1, {"a": 2}]'),
        (responses, 7, "7"),
        (responses, None, "<tool><"),
        (messages, [{"type": "image", "source": SOURCE}], NO_IMAGE),
        (messages, [MCP_IMAGE], NO_IMAGE),
        (messages, [INPUT_IMAGE], NO_IMAGE),
        (messages, [{"type": "input_text", "text": "T"}], "<tool>T<"),
        (messages, [{"type": "document", "source": PDF}], NO_FILE),
        (messages, [{"type": "document", "source": TEXT_FILE}], "<tool>hi<"),
        (messages, 7, "7"),
    ],
)
def test_a_result_that_the_model_cannot_read_is_named_and_refuses_nothing(api, result, seen):
    engine = ScriptedEngine("ok")
    answer = make_client(engine).post(APIS[api], json=api(result))
    assert answer.status_code == 200, answer.text
    [(prompt, _)] = engine.requests.values()
    assert seen in prompt and PNG not in prompt


def test_a_file_beside_a_result_is_named_and_a_file_of_a_user_is_refused():
    file = {"type": "document", "source": PDF}
    engine = ScriptedEngine("ok")
    client = make_client(engine)
    body = messages("r")
    body["messages"][-1]["content"].append(file)  # as Claude Code sends a PDF that it has read
    assert client.post(APIS[messages], json=body).status_code == 200
    [(prompt, _)] = engine.requests.values()
    assert f"<tool>r<user>{NO_FILE}" in prompt
    body["messages"].append({"role": "user", "content": [file]})
    answer = client.post(APIS[messages], json=body)
    assert answer.status_code == 400 and "send the text of the document" in answer.text


@loop_over("api", APIS)
def test_what_a_user_shows_is_never_left_out(api):
    image = {"type": "image_url", "image_url": {"url": URL}}
    body = api("r")
    conversation = body["input" if api is responses else "messages"]
    conversation.append({"role": "user", "content": [image]})
    answer = make_client(ScriptedEngine("ok")).post(APIS[api], json=body)
    assert answer.status_code == 400 and "this model reads text only" in answer.text


@loop_over(
    "api, kind, file, seen",
    [
        (chat, "file", NOTES, "<user>a.md\nhi"),
        (chat, "file", {"file_data": "aGk="}, "<user>hi"),
        (responses, "input_file", NOTES, "<user>a.md\nhi"),
        (responses, "file", NOTES, "<user>a.md\nhi"),
        (
            chat,
            "file",
            BINARY,
            "file.file_data is a PDF, and this server reads text only",
        ),
        (chat, "file", {"file_data": "AAA="}, "file_data is not text in UTF-8"),
        (chat, "file", {"file_data": "/+8="}, "file_data is not text in UTF-8"),
        (chat, "file", {"file_data": "hi there"}, "file_data must be base64, or a data: URL"),
        (chat, "file", {"file_data": 7}, "must be a file in base64, such as"),
        (
            chat,
            "file",
            {"file_id": "f"},
            "file.file_id is not supported, because this",
        ),
        (chat, "file", {}, "must be a file in base64, such as"),
        (responses, "input_file", BINARY, "input[0].content[0].file_data is a PDF"),
        (
            responses,
            "input_file",
            {"file_url": "http://a"},
            "file_url is not supported",
        ),
    ],
)
def test_a_file_is_read_as_text_or_refused_with_what_to_send_instead(api, kind, file, seen):
    part = {"type": kind, **file} if api is responses else {"type": kind, kind: file}
    if (api, kind) == (responses, "file"):
        part = {"type": kind, kind: file}
    engine = ScriptedEngine("ok")
    field = "input" if api is responses else "messages"
    body = {field: [{"role": "user", "content": [part]}]}
    answer = make_client(engine).post(APIS[api], json=body)
    if answer.status_code == 200:
        [(prompt, _)] = engine.requests.values()
        assert seen in prompt
    else:
        assert answer.status_code == 400 and seen in answer.json()["error"]["message"]


def test_the_messages_api_reads_parts_and_tools_in_the_forms_of_openai():
    template = TEMPLATE + "{% for t in tools or [] %}|{{ t.function.name }}{% endfor %}"
    engine = ScriptedEngine("ok")
    client = make_client(engine, chat_template=template)
    turns = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
    ]
    schema = {"type": "object"}
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": schema}},
        {"type": "function", "name": "g", "parameters": schema},
        {"type": "custom", "name": "h", "input_schema": schema},
    ]
    for choice in ("required", "any", {"type": "function", "function": {"name": "g"}}):
        body = {"messages": turns, "tools": tools, "tool_choice": choice, "max_tokens": 8}
        answer = client.post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
    prompts = {prompt for prompt, _ in engine.requests.values()}
    assert prompts == {"<system>d<user>u<assistant>|f|g|h"}
