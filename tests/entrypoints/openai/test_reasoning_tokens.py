"""Test the number of reasoning tokens in the usage: equal as a whole and streamed, in all APIs."""

import json

import pytest

from tests.engine.tokenizers_for_tests import byte_level, sentencepiece
from tests.entrypoints.openai.fakes import client_of
from tests.entrypoints.openai.test_thinking import GPT_OSS, ROUTERS, chat, message, respond
from tests.fake_core import FakeCoreLLM
from tests.loops import loop_over
from vllm.entrypoints.openai.chat.thought_tokens import ThoughtTokens
from vllm.entrypoints.openai.shared.logprob_formats import bytes_of_tokens
from vllm.reasoning import ReasoningParserManager

CALL = '<tool_call>{"name": "look", "arguments": {"at": "a"}}</tool_call>'
OUTPUTS = [
    ("qwen3", "<think>Łódź is far.</think>", "Łódź is far."),
    ("qwen3", "\n<think>\nI look.\n</think>\n\nText", "\nI look.\n"),
    ("qwen3", f"<think>I look.</think>{CALL}", "I look."),
    ("qwen3", f"<think>I look.</think>Wait.\n{CALL}", "I look."),
    ("qwen3", "no thoughts", ""),
    ("qwen3", "<think></think>x", ""),
    ("qwen3", "<think>cut off é", "cut off é"),
    ("deepseek_r1", " I look.</think>x", " I look."),
    ("kimi_k2", "I look.<|tool_calls_section_begin|>", "I look."),
    ("openai_gptoss", GPT_OSS, "Hm."),
    ("openai_gptoss", GPT_OSS.replace("commentary<|message|>", "analysis<|message|>"), "Hm.Wait."),
]
FUNCTION = {"name": "look", "parameters": {"type": "object"}}
REQUESTS = [
    chat(tools=[{"type": "function", "function": FUNCTION}]),
    respond(tools=[{"type": "function", **FUNCTION}]),
    message(tools=[{"name": "look", "input_schema": {"type": "object"}}]),
]


def reported(usage):
    """Return the numbers of reasoning tokens and of all output tokens in a usage."""
    if "completion_tokens" in usage:
        number = usage["completion_tokens_details"]["reasoning_tokens"]
        return number, usage["completion_tokens"]
    (number,) = usage["output_tokens_details"].values()
    return number, usage["output_tokens"]


def usage_of_stream(text):
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line[:6] == "data: "]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    found = [each.get("usage") or each.get("response", {}).get("usage") for each in events]
    return [usage for usage in found if usage][-1]


@loop_over("by_character", [False, True])
@loop_over("parser, text, thoughts", OUTPUTS)
def test_whole_and_streamed_answers_count_the_same_thoughts(parser, text, thoughts, by_character):
    tokenizer = byte_level()
    pieces = text if by_character else [text]
    script = [
        i for piece in pieces for i in tokenizer(piece, add_special_tokens=False)["input_ids"]
    ]
    engine = FakeCoreLLM(lambda request: script, max_model_len=1024)
    flags = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    seen = set()
    with client_of(engine, *ROUTERS, reasoning_parser=parser, **flags) as client:
        for path, body in REQUESTS:
            body["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = len(script)
            whole = client.post(path, json=body)
            assert whole.status_code == 200, whole.text
            seen.add(reported(whole.json()["usage"]))
            options = {"stream_options": {"include_usage": True}} if "chat" in path else {}
            stream = client.post(path, json={**body, "stream": True, **options})
            seen.add(reported(usage_of_stream(stream.text)))
    [(number, total)] = seen
    assert total == len(script)
    if by_character:
        assert number == sum(len(tokenizer(c, add_special_tokens=False)[0]) for c in thoughts)
    else:
        assert bool(thoughts) == bool(number) and number <= total


def test_a_server_without_a_reasoning_parser_reports_no_details():
    with client_of(FakeCoreLLM(lambda request: [5]), *ROUTERS) as client:
        path, body = chat()
        usage = client.post(path, json=body).json()["usage"]
    assert "completion_tokens_details" not in usage


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_a_token_counts_once_if_any_of_its_text_is_a_thought(make):
    tokenizer = make()
    ids = tokenizer("the cat sat", add_special_tokens=False)["input_ids"]
    tokens = ThoughtTokens(tokenizer, skipped={tokenizer.eos_token_id})
    tokens.add([*ids, tokenizer.eos_token_id])
    length = len(b"".join(map(bytes_of_tokens(tokenizer), ids)))
    assert tokens.count([(0, length)]) == tokens.count([(0, 3), (3, length)]) == len(ids)
    assert tokens.count([]) == 0
    assert tokens.count([(0, 1)]) == tokens.count([(0, 1), (1, 1)]) == 1


def test_a_text_in_pieces_has_the_spans_of_a_whole_one():
    for name, text, thoughts in OUTPUTS:
        kind = ReasoningParserManager.get(name)
        whole, streamed = kind(None), kind(None)
        whole.read_whole(text)
        for character in text:
            streamed.feed(character)
        streamed.finish()
        assert whole.spans == streamed.spans
        assert "".join(text[start:end] for start, end in whole.spans) == thoughts
