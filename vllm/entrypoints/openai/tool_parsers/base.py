"""What all tool parsers share: content, calls, and what becomes of text that is neither.

A model writes calls of tools into its text, each family of models in its own format. A parser
takes the text apart while it grows. Nothing of a text is lost: what turns out to be no call is
content, exactly as it was written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from vllm.entrypoints.openai.protocol.chat import (
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
    random_tool_call_id,
)
from vllm.utils.text_stream import Markers, TextStream, Wait

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RequestT = TypeVar("RequestT")

_CONTENT = -1
"""In place of a call's index: text beside the calls."""


@dataclass(slots=True)
class ParsedDelta:
    """What came next: content, or a piece of one call."""

    content: str | None = None
    """Text beside the calls."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """In the format of the API's `delta.tool_calls`: `index` and `function.arguments`, and in the
    first delta of a call also `id`, `type` and `function.name`."""


@dataclass(slots=True)
class _Part:
    """Text of one kind that came in a row, and where a call begins its head."""

    index: int
    head: dict[str, Any] | None = None
    pieces: list[str] = field(default_factory=list)

    def delta(self) -> ParsedDelta:
        text = "".join(self.pieces)
        if self.index == _CONTENT:
            return ParsedDelta(content=text)
        if self.head is None:
            return ParsedDelta(tool_calls=[{"index": self.index, "function": {"arguments": text}}])
        call = {"index": self.index, "id": self.head["id"], "type": "function"}
        function = {"name": self.head["name"], "arguments": text}
        return ParsedDelta(tool_calls=[call | {"function": function}])


class ToolParser:
    """Takes one output of a model apart into content and calls. Never raises for what it reads.

    White space before the first content, between calls and after the last one is left out when
    there are calls.

    Args:
        tokenizer: the model's; None where there is none.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """Texts after which calls come. None of them may hold another one."""
    further_tokens: ClassVar[tuple[str, ...]] = ()
    """Further texts of the format that may be special tokens of a model."""
    bare: ClassVar[str] = ""
    """Characters with which calls begin that have no marker: only at the beginning of a text."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None" = None) -> None:
        self.tokenizer = self.model_tokenizer = tokenizer
        # What parsers written for vLLM keep on their base class; nothing here reads it.
        self.prev_tool_call_arr: list[dict[str, Any]] = []
        self.current_tool_id = -1
        self.current_tool_name_sent = False
        self.streamed_args_for_tool: list[str] = []
        self.stream = TextStream()
        self._markers = Markers(self.markers)
        self._tools: Sequence[Any] = ()
        self._index = -1
        self._parts: list[_Part] = []
        self._blank: list[str] = []
        self._is_blank = True
        """Nothing but `_blank`, white space not shown yet, came since the last call."""
        self._steps = self._parse()

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Token -> id."""
        assert self.model_tokenizer is not None
        vocabulary: dict[str, int] = self.model_tokenizer.get_vocab()
        return vocabulary

    # --- For those who use a parser ---

    def adjust_request(self, request: RequestT) -> RequestT:
        """Prepare a request whose answers this parser is to read; returns the request.

        Where the format's markers are special tokens of the model, these must be in the text.
        """
        self._tools = getattr(request, "tools", None) or ()
        special = set(getattr(self.tokenizer, "all_special_tokens", ()))
        texts = (*self.markers, *self.further_tokens)
        if (
            self._tools
            and getattr(request, "tool_choice", "auto") != "none"
            and any(token and token in text for text in texts for token in special)
        ):
            request.skip_special_tokens = False  # type: ignore[attr-defined]
        return request

    def feed(self, delta_text: str, delta_token_ids: Sequence[int] = ()) -> list[ParsedDelta]:
        """Read on.

        Args:
            delta_text: what the text grows by.
            delta_token_ids: the tokens of it; no format here needs them.

        Returns:
            What is certain now, in the order of the text.
        """
        self.stream.add(delta_text)
        next(self._steps, None)
        return self._take_parts()

    def finish(self) -> list[ParsedDelta]:
        """The text has ended: what was held back."""
        self.stream.is_complete = True
        next(self._steps, None)
        return self._take_parts()

    def read_whole(self, text: str, token_ids: Sequence[int] = ()) -> list[ParsedDelta]:
        """Read a text that is complete, as the first and last thing."""
        return [*self.feed(text, token_ids), *self.finish()]

    def extract_tool_calls(self, text: str, request: object = None) -> ExtractedToolCallInformation:
        """Take a whole text apart. The same as feeding it, however it is cut.

        Args:
            text: one output, without reasoning.
            request: what it answers; `tools` of it tell the types of arguments.
        """
        parser = type(self)(self.tokenizer)
        parser._tools = getattr(request, "tools", None) or self._tools
        content: list[str] = []
        calls: list[ToolCall] = []
        for delta in [*parser.feed(text), *parser.finish()]:
            content.append(delta.content or "")
            for call in delta.tool_calls:
                if "id" in call:
                    calls.append(ToolCall(id=call["id"], function=FunctionCall(**call["function"])))
                else:  # only what `finish` adds, so this is done once
                    calls[-1].function.arguments += call["function"]["arguments"]
        return ExtractedToolCallInformation(
            tools_called=bool(calls), tool_calls=calls, content="".join(content) or None
        )

    # --- For formats ---

    def read_calls(self, marker: str) -> Wait[None]:
        """Read calls from `stream`, where they should begin.

        What it has read and neither made a call of nor accepted becomes content when it returns;
        so it returns as soon as something is not as it should be.

        Args:
            marker: the one of `markers` that was just read; empty for bare calls.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define read_calls")

    def start_call(self, name: str) -> None:
        """A call begins: what was read until now belongs to it."""
        self.accept()
        self._blank.clear()
        self._is_blank = True
        self._index += 1
        self._parts.append(_Part(self._index, {"id": self.make_id(), "name": name}))

    def add_arguments(self, text: str) -> None:
        """More of the JSON text of the last call's arguments; what was read belongs to it."""
        self.accept()
        self._add(self._index, text)

    def accept(self) -> None:
        """What was read since the last call of this method is part of the format."""
        self.stream.forget()

    def release(self) -> None:
        """What was read and not accepted is content."""
        self._add_content(self.stream.forget())

    def make_id(self) -> str:
        """A new id for a call."""
        return random_tool_call_id()

    def properties_of(self, name: str) -> Mapping[str, Any]:
        """The JSON schemas of a tool's parameters, as the request has them; empty if unknown."""
        for tool in self._tools:
            function = _member(tool, "function")
            if _member(function, "name") == name:
                properties = _member(_member(function, "parameters"), "properties")
                return properties if isinstance(properties, Mapping) else {}
        return {}

    # --- Machinery ---

    def _parse(self) -> Wait[None]:
        stream = self.stream
        if self.bare:
            char = yield from stream.skip_space()
            if char and char in self.bare:
                yield from self.read_calls((yield from self._read_marker()))
            self.release()
        while marker := (yield from stream.read_until(self._markers, self._pass_content)):
            stream.consume(len(marker))
            yield from self.read_calls(marker)
            self.release()
        if self._index < 0 and self._blank:
            self._add(_CONTENT, "".join(self._blank))

    def _read_marker(self) -> Wait[str]:
        """Read a marker if one is next, as it may begin as bare calls do; else empty."""
        for marker in self.markers:
            if (yield from self.stream.read_literal(marker)):
                return marker
        return ""

    def _pass_content(self, piece: str) -> None:
        self.stream.forget()
        self._add_content(piece)

    def _add_content(self, text: str) -> None:
        if self._is_blank:
            if not text.strip():
                if text:
                    self._blank.append(text)
                return
            text = "".join(self._blank) + text
            self._blank.clear()
            self._is_blank = False
        if text:
            self._add(_CONTENT, text)

    def _add(self, index: int, text: str) -> None:
        if not self._parts or self._parts[-1].index != index:
            self._parts.append(_Part(index))
        self._parts[-1].pieces.append(text)

    def _take_parts(self) -> list[ParsedDelta]:
        parts, self._parts = self._parts, []
        return [part.delta() for part in parts]


def _member(value: object, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
