"""Test calls that a stop string of the request ends: half a call is never presented as a whole
one.
"""

import json

from tests.entrypoints.openai.anthropic_client import accumulate
from tests.entrypoints.openai.scripted_engine import ScriptedEngine, make_client
from tests.entrypoints.openai.tool_parsers.formats import CALLS, SAMPLES
from tests.loops import loop_over
from vllm.entrypoints.openai.chat.output_reader import OutputReader
from vllm.entrypoints.openai.chat.tool_choice import merge_deltas
from vllm.entrypoints.openai.tool_parsers import ToolParserManager
from vllm.reasoning import ReasoningParserManager

HALF = ("<tool_call>", '{"name": "look", "arguments": {"at": "a', " END")
WHOLE = ("<tool_call>", '{"name": "look", "arguments": {"at": "a"}}', "</tool_call>", " END")
# A brace that is missing inside a complete call is a mistake of the model.
DAMAGED = (
    "<tool_call>",
    '{"name": "look", "arguments": {"at": "He said "a" and {"}}',
    "</tool_call>",
    " END",
)
LIST = ('[{"name": "look", "parameters": {"at": "a', " END")


@loop_over("name", SAMPLES)
def test_the_reader_knows_at_every_place_whether_a_call_has_an_end(name):
    text = SAMPLES[name]
    num_open = 0
    for size in range(len(text) + 1):
        reader = OutputReader(tools=ToolParserManager.get(name)())
        delta = reader.feed(text[:size], is_last=True, is_cut=True)
        calls = merge_deltas(delta.tool_calls)
        num_open += reader.has_open_call
        if calls and not reader.has_open_call:
            arguments = calls[-1]["function"]["arguments"]
            value, _ = json.JSONDecoder().raw_decode(arguments)
            assert value == CALLS[len(calls) - 1][1], text[:size]
    assert not reader.has_open_call and len(calls) == len(CALLS)
    # A call in the syntax of Python is sent when it is complete, so it is never open.
    assert num_open or "pythonic" in name or name in ("lfm2", "olmo3")


def read(text, is_cut, reasoning=None, tools=None):
    """Return the reasoning and the content of a text, which are the same for a stream."""
    found = []
    for pieces in ([text], text):
        reader = OutputReader(
            reasoning and ReasoningParserManager.get(reasoning)(is_thinking=True),
            tools and ToolParserManager.get(tools)(),
        )
        deltas = [reader.feed(piece) for piece in pieces[:-1]]
        deltas.append(reader.feed(pieces[-1], is_last=True, is_cut=is_cut))
        found.append(("".join(d.reasoning for d in deltas), "".join(d.content for d in deltas)))
    assert found[0] == found[1]
    return found[0]


def beginnings(markers):
    return [marker[:size] for marker in markers for size in range(3, len(marker))]


@loop_over("name", SAMPLES)
def test_half_a_marker_before_a_call_does_not_reach_the_user(name):
    for half in beginnings(ToolParserManager.get(name).markers):
        assert read(f"Hi {half}", True, tools=name) == ("", "Hi "), half
        # A model that ends its text there means it.
        assert read(f"Hi {half}", False, tools=name) == ("", f"Hi {half}"), half


@loop_over("name", sorted({*ReasoningParserManager.names()} - {"minimax_m2_append_think"}))
def test_half_a_marker_of_thoughts_does_not_reach_the_user(name):
    kind = ReasoningParserManager.get(name)
    for half in beginnings(kind.starts):
        assert read(half, True, name) == ("", ""), half
    for start in kind.starts:
        for half in beginnings(kind.ends):
            thoughts, content = read(f"{start}Hm{half}", True, name)
            assert (thoughts + content).endswith("Hm"), half


@loop_over("end", ["<|end|>", "<|call|>", "<|return|>", "<|channel|>"])
def test_half_an_end_of_a_message_does_not_reach_the_user(end):
    parsers = ("openai_gptoss", "openai")
    for half in beginnings([end]):
        for head in ("<|channel|>final", "<|channel|>commentary"):
            assert read(f"{head}<|message|>Hi{half}", True, *parsers) == ("", "Hi"), half
        assert read(f"<|channel|>analysis<|message|>Hm{half}", True, *parsers) == ("Hm", ""), half


def events(answer):
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def by_chat(client, *, stream, **fields):
    tools = [{"type": "function", "function": {"name": "look"}}]
    messages = [{"role": "user", "content": "u"}]
    body = {"messages": messages, "tools": tools, "stream": stream, **fields}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice = events(answer)[-1]["choices"][0] if stream else answer.json()["choices"][0]
    return choice["finish_reason"]


def by_responses(client, *, stream, **fields):
    tools = [{"type": "function", "name": "look"}]
    body = {"input": "u", "tools": tools, "stream": stream, **fields}
    answer = client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    response = events(answer)[-1]["response"] if stream else answer.json()
    reason = (response["incomplete_details"] or {}).get("reason")
    return response["status"], response["output"][-1]["status"], reason


def by_messages(client, *, stream, stop, **fields):
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    body = {"messages": [{"role": "user", "content": "u"}], "tools": tools, "max_tokens": 50}
    body |= {"stop_sequences": stop, "stream": stream, **fields}
    answer = client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    message = accumulate(events(answer)).to_dict() if stream else answer.json()
    return message["stop_reason"], message["stop_sequence"], list(message["content"][-1]["input"])


CUT = ("incomplete", "incomplete", "stop")
DONE = ("completed", "completed", None)


@loop_over(
    "pieces, fields, chat, responses, messages",
    [
        (HALF, {"stop": ["END"]}, "stop", CUT, ("stop_sequence", "END", ["INVALID_JSON"])),
        (WHOLE, {"stop": ["END"]}, "tool_calls", DONE, ("tool_use", None, ["at"])),
        (WHOLE, {"stop": ["</tool_call>"]}, "tool_calls", DONE, ("tool_use", None, ["at"])),
        (DAMAGED, {"stop": ["END"]}, "tool_calls", DONE, ("tool_use", None, ["INVALID_JSON"])),
    ],
)
def test_each_api_says_that_a_stop_string_has_cut_a_call(pieces, fields, chat, responses, messages):
    client = make_client(
        ScriptedEngine(*pieces), enable_auto_tool_choice=True, tool_call_parser="hermes"
    )
    for stream in (False, True):
        assert by_chat(client, stream=stream, **fields) == chat
        assert by_responses(client, stream=stream, **fields) == responses
        assert by_messages(client, stream=stream, **fields) == messages


def test_a_stop_token_of_the_request_and_a_required_call_are_no_exceptions():
    engine = ScriptedEngine(*HALF)
    client = make_client(engine, enable_auto_tool_choice=True, tool_call_parser="hermes")
    token = engine.given_tokenizer.convert_tokens_to_ids(" END")
    for stream in (False, True):
        assert by_chat(client, stream=stream, stop_token_ids=[token]) == "stop"
    client = make_client(ScriptedEngine(*LIST))
    for stream in (False, True):
        assert by_chat(client, stream=stream, stop="END", tool_choice="required") == "stop"
        assert by_responses(client, stream=stream, stop="END", tool_choice="required") == CUT
