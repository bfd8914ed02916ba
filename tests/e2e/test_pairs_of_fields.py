"""Test that any combination of fields gives the same answer as a whole and as a stream, or the same
error.

Run new combinations by hand for some minutes: `python -m tests.e2e.test_pairs_of_fields 10`.
"""

import json
import random
import sys
import time
from typing import Any

import pytest

from tests.e2e.conftest import CHAT_FLAGS
from tests.e2e.server import Server, start_server

pytestmark = pytest.mark.e2e

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "look"}}
USER = {"role": "user", "content": "def add(a, b):"}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "def"}, {"type": "text", "text": "x"}],
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"a": tr'}}
HISTORY = [
    {"role": "system", "content": "You write Python."},
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "r"},
]

SAMPLING: dict[str, list[Any]] = {
    "temperature": [0, 0.7, 1.5],
    "top_p": [0.1, 1],
    "top_k": [1, 50, -1],
    "min_p": [0.2],
    "n": [2, 3],
    "max_tokens": [1, 7, 40],
    "stop": ["e", ["\n", "return"]],
    "stop_token_ids": [[10, 20, 30]],
    "include_stop_str_in_output": [True],
    "ignore_eos": [True],
    "min_tokens": [1, 5],
    "skip_special_tokens": [False],
    "spaces_between_special_tokens": [False],
    "presence_penalty": [1.5],
    "frequency_penalty": [-1],
    "repetition_penalty": [1.3],
    "logit_bias": [{"5": -100, "300": 5}],
    "bad_words": [["self"]],
    "allowed_token_ids": [list(range(5, 400))],
    "return_tokens_as_token_ids": [True],
    "priority": [0],
    "truncate_prompt_tokens": [4],
    "cache_salt": ["a"],
}
"""Values of each field; a field may also be absent."""

CONSTRAINTS: list[dict[str, Any]] = [
    {"guided_regex": "[a-c]{2,9}"},
    {"guided_choice": ["yes", "no"]},
    {"guided_json": SCHEMA},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
]
"""One of them for each third request, and two for few."""

CHAT = SAMPLING | {
    "messages": [[USER], [PARTS], HISTORY, [USER, {"role": "assistant", "content": "    "}]],
    "logprobs": [True],
    "top_logprobs": [0, 3],
    "tools": [[TOOL]],
    "tool_choice": ["auto", "none", "required", NAMED],
    "parallel_tool_calls": [False],
    "echo": [True],
    "add_generation_prompt": [False],
    "continue_final_message": [True],
    "enable_thinking": [True],
    "max_completion_tokens": [9],
}
COMPLETION = SAMPLING | {
    "prompt": ["def add(a, b):", ["def", "class A"], [5, 6, 7], [[5], [6, 7]]],
    "logprobs": [0, 3],
    "echo": [True],
    "suffix": [None],
}
ROUTES = {
    "/v1/chat/completions": (CHAT, {"messages": [USER], "max_tokens": 12}),
    "/v1/completions": (COMPLETION, {"prompt": "def", "max_tokens": 12}),
}


def combination(path: str, rng: random.Random) -> dict[str, Any]:
    """Return a request with a few fields or with most fields, each with one of its values."""
    fields, body = ROUTES[path]
    share = rng.choice((0.1, 0.3, 0.6))
    chosen = {name: rng.choice(fields[name]) for name in fields if rng.random() < share}
    for limit in (0.33, 0.03):
        if rng.random() < limit:
            chosen |= rng.choice(CONSTRAINTS)
    return {**body, **chosen, "seed": rng.randrange(100)}


def read_whole(status: int, answer: bytes) -> dict[str, Any]:
    """Return the content of an answer, in the same form as `read_stream`."""
    found = json.loads(answer)
    if status != 200:
        return {"error": found["error"]}
    choices = [_joined([choice], "message") for choice in found["choices"]]
    return {"choices": choices, "usage": found["usage"]}


def read_stream(status: int, answer: bytes) -> dict[str, Any]:
    """Return the content of all events of a stream."""
    if status != 200:
        return read_whole(status, answer)
    lines = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    if "error" in events[-1]:
        return {"error": events[-1]["error"]}
    assert answer.rstrip().endswith(b"data: [DONE]")
    choices: dict[int, list[Any]] = {}
    for event in events:
        for choice in event["choices"]:
            choices.setdefault(choice["index"], []).append(choice)
    ordered = [_joined(choices[index], "delta") for index in sorted(choices)]
    return {"choices": ordered, "usage": events[-1]["usage"]}


def _joined(pieces: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Return text, thoughts, calls, finish reasons and the number of log-probabilities of one
    choice.
    """
    texts = dict.fromkeys(("content", "reasoning_content", "text"), "")
    calls: dict[int, list[str]] = {}
    num_logprobs = 0
    for piece in pieces:
        said = piece.get(kind) or piece
        for name in texts:
            texts[name] += said.get(name) or ""
        for place, call in enumerate(said.get("tool_calls") or ()):
            function = calls.setdefault(call.get("index", place), ["", ""])
            function[0] += call["function"].get("name") or ""
            function[1] += call["function"].get("arguments") or ""
        logprobs = piece.get("logprobs") or {}
        num_logprobs += len(logprobs.get("content") or logprobs.get("tokens") or ())
    last = pieces[-1]
    reasons = (last["finish_reason"], last.get("stop_reason"))
    return {**texts, "calls": calls, "reasons": reasons, "num_logprobs": num_logprobs}


def compare(server: Server, path: str, body: dict[str, Any]) -> int:
    """Send a request whole and as a stream. Returns the status of the whole answer."""
    status, _, answer = server.request("POST", path, body)
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    again, _, events = server.request("POST", path, streamed)
    whole, stream = read_whole(status, answer), read_stream(again, events)
    assert status in (200, 400), (path, body, answer)
    assert whole == stream, (path, body)
    return status


@pytest.mark.parametrize("count", [25, pytest.param(600, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("path", ROUTES)
def test_whole_answers_and_streams_say_the_same(chat_server, path, count):
    rng = random.Random(path)
    statuses = [compare(chat_server, path, combination(path, rng)) for _ in range(count)]
    assert statuses.count(200) > count // 4


def main(minutes: float) -> None:
    """Compare new combinations for some minutes, and print each that fails."""
    rng, end = random.Random(), time.monotonic() + 60 * minutes
    counts = dict.fromkeys((200, 400, "failed"), 0)
    with start_server(*CHAT_FLAGS) as server:
        while time.monotonic() < end:
            path = rng.choice(list(ROUTES))
            try:
                counts[compare(server, path, combination(path, rng))] += 1
            except AssertionError as error:
                counts["failed"] += 1
                print(str(error)[:3000], file=sys.stderr)
    print(json.dumps({str(name): count for name, count in counts.items()}))


if __name__ == "__main__":
    main(float(sys.argv[1]))
