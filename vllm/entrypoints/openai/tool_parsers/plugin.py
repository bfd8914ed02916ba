"""Adapt tool parsers that were written for vLLM to this server's interface.

Such a parser has `extract_tool_calls` for whole outputs and `extract_tool_calls_streaming` for
deltas. Unlike this server's parsers it gets the whole text at each step, and it may leave the end
of the last call's arguments to the server: `prev_tool_call_arr` contains the calls as far as they
are known.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest, random_tool_call_id
from vllm.entrypoints.openai.tool_parsers.base import ParsedDelta, ToolParser
from vllm.reasoning.plugin import OutputHistory
from vllm.utils.parser_registry import overrides_first


def is_foreign(parser: type[ToolParser]) -> bool:
    """Return whether a class is written for the interface of vLLM."""
    return overrides_first(
        parser,
        ("extract_tool_calls", "extract_tool_calls_streaming"),
        ("read_calls", "feed"),
        base=ToolParser,
    )


class VllmToolParserAdapter:
    """Reads one output with a parser written for vLLM. Has the methods of `ToolParser` that the
    server calls. Errors of the parser are passed on.

    Args:
        parser: a parser for only this output.
    """

    form = None
    """None, because a grammar cannot know the format of a plug-in."""
    reads_tokens = True
    """A parser of this kind may look for the tokens of markers."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self._request: ChatCompletionRequest | None = None
        self._history = OutputHistory()
        self._sent: dict[int, str] = {}
        """Index of a call -> the arguments sent so far."""

    def adjust_request(self, request: ChatCompletionRequest) -> ChatCompletionRequest:
        """Prepare the parser for the output of a request, and return the request, possibly
        changed.
        """
        adjusted = self._parser.adjust_request(request=request)
        if adjusted is not None and adjusted is not request:
            for name in type(request).model_fields:
                setattr(request, name, getattr(adjusted, name))
        self._request = request
        return request

    @property
    def further_tokens(self) -> tuple[str, ...]:
        """Texts other than the markers that may be special tokens of the model."""
        return self._parser.further_tokens

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts with which calls may begin; most parsers have none."""
        return self._parser.markers

    def call_starts(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the strings with which calls begin; most classes have none."""
        return self._parser.call_starts(names)

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParsedDelta]:
        """Read new text, and return the new content and the new parts of calls."""
        if not text and not token_ids:
            return []
        arguments = self._history.grow(text, token_ids)
        delta = self._parser.extract_tool_calls_streaming(**arguments, request=self._request)
        if delta is None:
            return []
        calls = [self._note(_as_dict(call)) for call in delta.tool_calls or ()]
        return [ParsedDelta(delta.content, calls)]

    def finish(self, *, is_cut: bool = False) -> list[ParsedDelta]:
        """End the text, and return the rest of the last call's arguments that was not sent.

        Args:
            is_cut: the model did not end the text itself.
        """
        self._parser.stream.is_cut = is_cut
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

    def read_whole(
        self, text: str, token_ids: Sequence[int] = (), *, is_cut: bool = False
    ) -> list[ParsedDelta]:
        """Read a complete text. It must be the only call of this parser."""
        found = self._parser.extract_tool_calls(text, request=self._request)
        calls = [
            self._note({"index": index, **_as_dict(call)})
            for index, call in enumerate(found.tool_calls if found.tools_called else ())
        ]
        return [ParsedDelta(found.content, calls)]

    def _note(self, call: dict[str, Any]) -> dict[str, Any]:
        """Record a delta of a call, and add missing fields if it is the first delta of the call."""
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
    """Yield the arguments as JSON text, in each form in which parsers write them."""
    if isinstance(arguments, str):
        yield arguments
    elif arguments:
        yield json.dumps(arguments, ensure_ascii=False)
        yield json.dumps(arguments)
