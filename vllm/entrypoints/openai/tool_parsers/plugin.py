"""Adapts tool parsers that were written for vLLM to this server's interface.

Such a parser has `extract_tool_calls` for whole outputs and `extract_tool_calls_streaming` for
deltas. Unlike ours it is given the whole text at each step, and it may leave the end of the last
call's arguments to the server: `prev_tool_call_arr` holds the calls as far as they are known.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest, random_tool_call_id
from vllm.entrypoints.openai.tool_parsers.base import ParsedDelta, ToolParser
from vllm.reasoning.plugin import OutputHistory
from vllm.utils.parser_registry import overrides_first


def is_foreign(parser: type[ToolParser]) -> bool:
    """Whether a class is written for the interface of vLLM."""
    return overrides_first(
        parser,
        ("extract_tool_calls", "extract_tool_calls_streaming"),
        ("read_calls", "feed"),
        base=ToolParser,
    )


class VllmToolParserAdapter:
    """Reads one output with a parser written for vLLM. Has the methods of `ToolParser` that the
    server calls, and raises what the parser raises.

    Args:
        parser: a parser for this output only.
    """

    form = None
    """A grammar cannot know the format."""
    reads_tokens = True
    """Such a parser may look for the tokens of markers."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self._request: ChatCompletionRequest | None = None
        self._history = OutputHistory()
        self._sent: dict[int, str] = {}
        """Index of a call -> the arguments sent so far."""

    def adjust_request(self, request: ChatCompletionRequest) -> ChatCompletionRequest:
        """Prepare a request whose output this parser will read. Returns the request."""
        adjusted = self._parser.adjust_request(request=request)
        if adjusted is not None and adjusted is not request:
            for name in type(request).model_fields:
                setattr(request, name, getattr(adjusted, name))
        self._request = request
        return request

    @property
    def further_tokens(self) -> tuple[str, ...]:
        """Return the further tokens of its class."""
        texts: tuple[str, ...] = self._parser.further_tokens
        return texts

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the markers of its class; most classes have none."""
        texts: tuple[str, ...] = self._parser.markers
        return texts

    def call_starts(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the texts with which calls begin; most classes know none."""
        starts: tuple[str, ...] = self._parser.call_starts(names)
        return starts

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParsedDelta]:
        """Read new text. Returns the new content and the new parts of calls."""
        if not text and not token_ids:
            return []
        arguments = self._history.grow(text, token_ids)
        delta = self._parser.extract_tool_calls_streaming(**arguments, request=self._request)
        if delta is None:
            return []
        calls = [self._note(_as_dict(call)) for call in delta.tool_calls or ()]
        return [ParsedDelta(delta.content, calls)]

    def finish(self) -> list[ParsedDelta]:
        """End the text. Returns what is known of the last call's arguments and was not sent."""
        held_back: list[ParsedDelta] = self._parser.finish()
        if held_back:  # a built-in parser, from which this parser is derived, held text back
            for delta in held_back:
                delta.tool_calls = [self._note(call) for call in delta.tool_calls]
            return held_back
        if not self._sent:
            return []
        index = max(self._sent)
        known = self._parser.prev_tool_call_arr
        if index >= len(known):
            return []
        sent = self._sent[index]
        for whole in _texts_of(known[index].get("arguments")):
            if whole.startswith(sent) and whole != sent:
                rest = {"index": index, "function": {"arguments": whole[len(sent) :]}}
                return [ParsedDelta(tool_calls=[self._note(rest)])]
        return []

    def read_whole(self, text: str, token_ids: Sequence[int] = ()) -> list[ParsedDelta]:
        """Read a complete text; the only call for a parser."""
        found = self._parser.extract_tool_calls(text, request=self._request)
        calls = [
            self._note({"index": index, **_as_dict(call)})
            for index, call in enumerate(found.tool_calls if found.tools_called else ())
        ]
        return [ParsedDelta(found.content, calls)]

    def _note(self, call: dict[str, Any]) -> dict[str, Any]:
        """Keep account of a delta of a call; what its first one lacks is added."""
        index = call["index"]
        function = call.setdefault("function", {})
        if index not in self._sent:
            call["id"] = call.get("id") or random_tool_call_id()
            call["type"] = "function"
            function.setdefault("arguments", "")
        self._sent[index] = self._sent.get(index, "") + (function.get("arguments") or "")
        return call


def _as_dict(call: Any) -> dict[str, Any]:
    """Return a `ToolCall` or `DeltaToolCall` as a dict; it may be a dict already."""
    values = dict(call) if isinstance(call, dict) else call.model_dump(exclude_none=True)
    if not isinstance(values.get("function", {}), dict):
        values["function"] = values["function"].model_dump(exclude_none=True)
    return values


def _texts_of(arguments: Any) -> Iterator[str]:
    """Yield arguments as JSON text, in the ways in which parsers write it."""
    if isinstance(arguments, str):
        yield arguments
    elif arguments:
        yield json.dumps(arguments, ensure_ascii=False)
        yield json.dumps(arguments)
