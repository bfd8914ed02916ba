"""Write answers in Anthropic's format: content blocks of the model's output, and stream events.

Independent of engine and framework: `MessageWriter` gets the parsed parts of a turn in order, and
returns events as JSON objects. Answers without streaming are created in the same way.
"""

import json
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

Event = dict[str, Any]

_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Type of a block -> type of its deltas, and the key of their content."""
INVALID_JSON = "INVALID_JSON"
"""The key of the text of arguments that are no JSON object. Anthropic gives clients this name for
sending such arguments back."""


class MessageWriter:
    """Builds one message piece by piece, and returns its stream events.

    Args:
        message_id: id of the message.
        model: model name for the client.
    """

    def __init__(self, message_id: str, model: str) -> None:
        self.message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": describe_usage(0, 0, 0),
        }
        self._block: dict[str, Any] | None = None
        """The open block, which is the last one of the content; None if there is none."""
        self._parts: list[str] = []
        self._call_index = -1

    @property
    def has_calls(self) -> bool:
        """Whether one of the blocks is a tool call."""
        return self._call_index >= 0

    def begin(self, usage: Mapping[str, Any]) -> list[Event]:
        """Return the events that begin the message.

        Args:
            usage: result of `describe_usage`, as far as it is known.
        """
        self.message["usage"] = usage
        return [
            {"type": "message_start", "message": {**self.message, "content": []}},
            {"type": "ping"},
        ]

    def add_reasoning(self, delta: str) -> list[Event]:
        """Add reasoning, and return its events."""
        # The signature is empty: Anthropic's servers sign blocks to verify them later, and this
        # server does not verify them.
        events = self._enter({"type": "thinking", "thinking": "", "signature": ""})
        return [*events, self._delta(delta)]

    def add_text(self, delta: str) -> list[Event]:
        """Add text of the answer, and return its events."""
        return [*self._enter({"type": "text", "text": ""}), self._delta(delta)]

    def add_tool_call(self, delta: Mapping[str, Any]) -> list[Event]:
        """Add a delta of a tool call, and return its events.

        Args:
            delta: {"index", "id", "function": {"name", "arguments"}}, as in the chat API. The first
                delta of an index has the id and the name. Calls follow one after another.
        """
        function = delta.get("function") or {}
        events: list[Event] = []
        if delta["index"] != self._call_index:
            events = self._close()
            self._call_index = delta["index"]
        call_id = delta.get("id") or f"toolu_{uuid.uuid4().hex}"
        name = function.get("name") or ""
        events += self._enter({"type": "tool_use", "id": call_id, "name": name, "input": {}})
        if arguments := function.get("arguments"):
            self._parts.append(arguments)
            # An empty delta shows the client that the connection is alive.
            events.append(self._event_of_delta(""))
        return events

    def finish(
        self, stop_reason: str, stop_sequence: str | None, usage: Mapping[str, Any]
    ) -> list[Event]:
        """Return the events that end the message.

        Args:
            stop_reason: reason from `describe_stop`.
            stop_sequence: stop string that ended the message, or None.
            usage: result of `describe_usage`.
        """
        events: list[Event] = []
        if not self.message["content"]:
            events = self._enter({"type": "text", "text": ""})
        events += self._close(is_cut=stop_reason in ("max_tokens", "stop_sequence"))
        end = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        self.message.update(end, usage=usage)
        events.append({"type": "message_delta", "delta": end, "usage": usage})
        return [*events, {"type": "message_stop"}]

    def _enter(self, block: dict[str, Any]) -> list[Event]:
        """Return the events that close the open block and begin this one; none if a block of this
        type is already open.
        """
        if self._block is not None and self._block["type"] == block["type"]:
            return []
        events = self._close()
        self._block = block
        self.message["content"].append(block)
        return [*events, self._event("content_block_start", content_block=dict(block))]

    def _close(self, *, is_cut: bool = False) -> list[Event]:
        """Return the events that close the open block.

        The arguments of a tool call are sent here as one piece, because only now it is known
        whether they are a JSON object.
        """
        block = self._block
        if block is None:
            return []
        text = "".join(self._parts)
        events = []
        if block["type"] == "tool_use":
            block["input"], text = _read_arguments(text, is_cut=is_cut)
            events = [self._event_of_delta(text)] if text else []
        else:
            block[block["type"]] = text
        events.append(self._event("content_block_stop"))
        self._block, self._parts = None, []
        return events

    def _delta(self, text: str) -> Event:
        self._parts.append(text)
        return self._event_of_delta(text)

    def _event_of_delta(self, text: str) -> Event:
        assert self._block is not None
        kind, key = _DELTAS[self._block["type"]]
        return self._event("content_block_delta", delta={"type": kind, key: text})

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "index": len(self.message["content"]) - 1, **fields}


def describe_usage(
    num_prompt_tokens: int,
    num_output_tokens: int,
    num_cached_tokens: int,
    num_thinking_tokens: int | None = None,
) -> dict[str, Any]:
    """Return the `usage` of a message, in which cached prompt tokens are counted separately.

    If `num_thinking_tokens` is None, the details of the output are left out.
    """
    usage: dict[str, Any] = {
        "input_tokens": num_prompt_tokens - num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached_tokens,
        "output_tokens": num_output_tokens,
    }
    if num_thinking_tokens is not None:
        usage["output_tokens_details"] = {"thinking_tokens": num_thinking_tokens}
    return usage


def describe_stop(
    finish_reason: str | None, stop_reason: int | str | None, *, has_calls: bool
) -> tuple[str, str | None]:
    """Return `stop_reason` and `stop_sequence` of a message.

    Args:
        finish_reason: finish reason of the chat API.
        stop_reason: stop string or stop token that ended the output, or None.
        has_calls: whether the message calls tools, and the last call is complete.
    """
    if finish_reason == "length":
        return "max_tokens", None
    if has_calls:
        return "tool_use", None
    if isinstance(stop_reason, str):
        return "stop_sequence", stop_reason
    return "end_turn", None


def _read_arguments(text: str, *, is_cut: bool) -> tuple[dict[str, Any], str]:
    """Return the arguments of a call as an object, and the JSON text of this object.

    If the text is not a JSON object, because of a mistake of the model or because it was cut off,
    it becomes the value of one argument with an unknown name. A tool refuses that name; otherwise
    it might run with incomplete arguments.
    """
    try:
        return msgspec.json.decode(text or ("" if is_cut else "{}"), type=dict[str, Any]), text
    except (msgspec.DecodeError, RecursionError):
        whole = {INVALID_JSON: text}
        return whole, json.dumps(whole, ensure_ascii=False)
