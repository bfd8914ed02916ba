"""Convert the model's output to items and events of the Responses API.

Independent of engine and framework: `ResponseWriter` gets the parsed parts of a turn in order, and
returns events as JSON objects. Responses without streaming are created in the same way.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from vllm.entrypoints.openai.shared.response_items import Item, new_id

Event = dict[str, Any]
_CALL_TEXTS = {
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
"""Type of a call -> name of the events about its text, and the key of the text."""
Status = Literal["completed", "incomplete", "failed", "cancelled"]


class ResponseWriter:
    """Builds one response piece by piece, and returns its events.

    Args:
        response: fields of the response; the writer sets status, output, usage and the fields about
            the end.

    Attributes:
        response: current state of the response.
        has_ended: `finish` was called.
    """

    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response
        self.has_ended = False
        self._sequence_number = 0
        self._item: Item | None = None
        """The open item, which is the last one of the output; None if there is none."""
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        """Log-probabilities of the open text."""
        self._new_logprobs: list[dict[str, Any]] = []
        """Log-probabilities of tokens whose text has not arrived yet."""
        self._call_index = -1

    def queue(self) -> list[Event]:
        """Mark the response as queued in the background, and return the events."""
        self.response["status"] = "queued"
        return [self._lifecycle("created"), self._lifecycle("queued")]

    def begin(self) -> list[Event]:
        """Mark the response as in progress, and return the events."""
        is_new = self._sequence_number == 0
        self.response["status"] = "in_progress"
        created = [self._lifecycle("created")] if is_new else []
        return [*created, self._lifecycle("in_progress")]

    def add_reasoning(self, delta: str) -> list[Event]:
        """Add reasoning, and return its events."""
        events = self._enter("reasoning", _reasoning_item)
        self._texts.append(delta)
        event = self._event("response.reasoning_text.delta", content_index=0, delta=delta)
        return [*events, event]

    def add_text(self, delta: str, logprobs: list[dict[str, Any]] | None = None) -> list[Event]:
        """Add text of the answer, and return its events.

        Args:
            delta: the text; may be empty if a token has no text yet.
            logprobs: log-probabilities of its tokens, in the format of the chat API.
        """
        self._new_logprobs += logprobs or ()
        if not delta:
            return []
        events = self._enter("message", _message_item)
        self._texts.append(delta)
        logprobs, self._new_logprobs = self._new_logprobs, []
        self._logprobs += logprobs
        event = self._event(
            "response.output_text.delta", content_index=0, delta=delta, logprobs=logprobs
        )
        return [*events, event]

    def add_tool_call(self, delta: Mapping[str, Any]) -> list[Event]:
        """Add a delta of a tool call, and return its events.

        Args:
            delta: {"index", "id", "function": {"name", "arguments"}} as in the chat API, or
                {"custom": {"name", "input"}} instead of the function. The first delta of an index
                has the id and the name. Calls follow one after another.
        """
        is_custom = "custom" in delta
        call = delta.get("custom") or delta.get("function") or {}
        kind = "custom_tool_call" if is_custom else "function_call"
        events: list[Event] = []
        if delta["index"] != self._call_index:
            events = self._close()
            self._call_index = delta["index"]
        call_id, name = delta.get("id") or new_id("call"), call.get("name") or ""
        events += self._enter(kind, lambda: _call_item(kind, call_id, name))
        if text := call.get("input" if is_custom else "arguments"):
            self._texts.append(text)
            events.append(self._event(f"response.{_CALL_TEXTS[kind][0]}.delta", delta=text))
        return events

    def finish(
        self,
        status: Status,
        *,
        usage: Mapping[str, Any] | None = None,
        incomplete_reason: str | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> list[Event]:
        """End the response, and return the events. A cancelled response has no event: its stream
        just ends.

        Args:
            status: how the response ended.
            usage: usage in the format of this API.
            incomplete_reason: such as "max_output_tokens".
            error: {"code", "message"} if the response has failed.
        """
        events: list[Event] = []
        if status == "completed" and not self.response["output"]:
            events += self._enter("message", _message_item)
        events += self._close("completed" if status == "completed" else "incomplete")
        self.has_ended = True
        self.response["status"] = status
        self.response["usage"] = usage
        if incomplete_reason is not None:
            self.response["incomplete_details"] = {"reason": incomplete_reason}
        self.response["error"] = error
        if status == "completed":
            self.response["completed_at"] = int(time.time())
        return events if status == "cancelled" else [*events, self._lifecycle(status)]

    def fail(self, error: Mapping[str, Any]) -> list[Event]:
        """End a failed response, and return the events, the last one for the error.

        OpenAI's clients raise at an event with the key `error`. It is last, so that other clients
        see the failed response before it.

        Args:
            error: error in the format of the other routes.
        """
        message = error["message"]
        events = self.finish("failed", error={"code": "server_error", "message": message})
        about = {
            "code": error["code"] or error["type"],
            "message": message,
            "param": error["param"],
        }
        return [*events, self._numbered("error", **about, error=error)]

    def _enter(self, kind: str, make: Callable[[], Item]) -> list[Event]:
        """Return the events that close the open item and begin a new one; none if an item of this
        type is already open.
        """
        if self._item is not None and self._item["type"] == kind:
            return []
        events = self._close()
        self._item = make()
        self.response["output"].append(self._item)
        events.append(self._item_event("added"))
        if kind not in _CALL_TEXTS:
            events.append(
                self._event("response.content_part.added", content_index=0, part=self._part(""))
            )
        return events

    def _close(self, status: str = "completed") -> list[Event]:
        """Return the events that close the open item."""
        item = self._item
        if item is None:
            return []
        text = "".join(self._texts)
        if item["type"] in _CALL_TEXTS:
            events = [self._call_done(item, text)]
        else:
            self._logprobs += self._new_logprobs
            part = self._part(text)
            item["content"] = [part]
            events = [self._text_done(text)]
            events.append(self._event("response.content_part.done", content_index=0, part=part))
        item["status"] = status
        events.append(self._item_event("done"))
        self._item, self._texts, self._logprobs, self._new_logprobs = None, [], [], []
        return events

    def _call_done(self, item: Item, text: str) -> Event:
        event, key = _CALL_TEXTS[item["type"]]
        item[key] = text
        more = {"name": item["name"]} if item["type"] == "function_call" else {}
        return self._event(f"response.{event}.done", **{key: text}, **more)

    def _text_done(self, text: str) -> Event:
        assert self._item is not None
        if self._item["type"] == "reasoning":
            return self._event("response.reasoning_text.done", content_index=0, text=text)
        return self._event(
            "response.output_text.done", content_index=0, text=text, logprobs=self._logprobs
        )

    def _part(self, text: str) -> dict[str, Any]:
        assert self._item is not None
        if self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def _event(self, kind: str, **fields: Any) -> Event:
        """Return an event about the open item."""
        assert self._item is not None
        return self._numbered(
            kind, item_id=self._item["id"], output_index=len(self.response["output"]) - 1, **fields
        )

    def _item_event(self, what: str) -> Event:
        assert self._item is not None
        return self._numbered(
            f"response.output_item.{what}",
            output_index=len(self.response["output"]) - 1,
            item=dict(self._item),
        )

    def _lifecycle(self, what: str) -> Event:
        snapshot = {**self.response, "output": list(self.response["output"])}
        return self._numbered(f"response.{what}", response=snapshot)

    def _numbered(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return event


def _reasoning_item() -> Item:
    return {
        "id": new_id("rs"),
        "type": "reasoning",
        "status": "in_progress",
        "summary": [],
        "content": [],
    }


def _message_item() -> Item:
    return {
        "id": new_id("msg"),
        "type": "message",
        "status": "in_progress",
        "role": "assistant",
        "content": [],
    }


def _call_item(kind: str, call_id: str, name: str) -> Item:
    return {
        "id": new_id("fc" if kind == "function_call" else "ctc"),
        "type": kind,
        "status": "in_progress",
        "call_id": call_id,
        "name": name,
        _CALL_TEXTS[kind][1]: "",
    }


def describe_usage(
    *,
    num_prompt_tokens: int,
    num_output_tokens: int,
    num_cached_tokens: int,
    num_reasoning_tokens: int,
) -> dict[str, Any]:
    """Return the `usage` of a response."""
    return {
        "input_tokens": num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }
