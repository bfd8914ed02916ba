"""Define the base class of tool parsers, which split a text into content and tool calls.

A model writes tool calls into its text, in the format of its family. A parser splits the text
incrementally. No text is lost: everything that is not a call is content, exactly as it was written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from vllm.entrypoints.openai.protocol.chat import (
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
    random_tool_call_id,
)
from vllm.entrypoints.openai.protocol.tools import CallForm
from vllm.utils.text.text_stream import Markers, TextStream, Wait

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RequestT = TypeVar("RequestT")

_CONTENT = -1
"""Index of text outside calls, instead of the index of a call."""


@dataclass(slots=True)
class ParsedDelta:
    """The next part of an output: content, or a piece of one call."""

    content: str | None = None
    """Text outside calls."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """Parts of tool calls, in the format of the API's `delta.tool_calls`: `index` and
    `function.arguments`, and in the first delta of a call also `id`, `type` and `function.name`."""


@dataclass(slots=True)
class _Part:
    """Consecutive text of one type; at the beginning of a call also its id and name."""

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
    """Splits one output of a model into content and tool calls. Never raises for any text.

    If there are calls, white space before the first content, between calls and after the last call
    is removed.

    Args:
        tokenizer: tokenizer of the model, or None.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """Texts that come before calls. None of them may contain another one."""
    further_tokens: ClassVar[tuple[str, ...]] = ()
    """Further texts of the format that may be special tokens of the model."""
    form: ClassVar[CallForm | None] = None
    """The JSON after a marker, which a grammar can hold to schemas. None: other text may follow."""
    bare: ClassVar[str] = ""
    """First characters of calls without a marker, which are only found at the beginning of a
    text."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None" = None) -> None:
        self.tokenizer = self.model_tokenizer = tokenizer
        self._markers = Markers(self.markers)
        self._tools: Sequence[Any] = ()
        self._begin()

    def _begin(self) -> None:
        """Forget the previous output, to read another one."""
        # Programs written for vLLM read these attributes. `extract_tool_calls_streaming` updates
        # them.
        self.prev_tool_call_arr: list[dict[str, Any]] = []
        self.current_tool_id = -1
        self.current_tool_name_sent = False
        self.streamed_args_for_tool: list[str] = []
        self.stream = TextStream()
        self._index = -1
        self._parts: list[_Part] = []
        self._blank: list[str] = []
        self._is_blank = True
        """Whether only white space (`_blank`, not returned yet) has come since the last call."""
        self._steps = self._parse()

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Map from each token to its id."""
        assert self.model_tokenizer is not None
        return self.model_tokenizer.get_vocab()

    # --- For those who use a parser ---

    def adjust_request(self, request: RequestT) -> RequestT:
        """Prepare for the output of a request, and return the request, possibly changed."""
        self._tools = getattr(request, "tools", None) or ()
        return request

    def call_starts(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the strings with which an answer begins if and only if it contains tool calls.

        If a grammar applies only to answers without calls, an output may begin with one of these
        strings instead.

        Args:
            names: names of the tools.
        """
        return self.markers

    def free_calls(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the strings after a marker with which calls begin that do not have the JSON form
        `form`.

        Args:
            names: names of the tools.
        """
        return ()

    def feed(self, delta_text: str, delta_token_ids: Sequence[int] = ()) -> list[ParsedDelta]:
        """Read new text, and return its parts.

        Args:
            delta_text: the new text.
            delta_token_ids: tokens of the new text; no built-in parser needs them.

        Returns:
            The parts that are certain now, in the order of the text.
        """
        self.stream.add(delta_text)
        next(self._steps, None)
        return self._take_parts()

    def finish(self, *, is_cut: bool = False) -> list[ParsedDelta]:
        """End the text, and return the parts that were held back.

        Args:
            is_cut: the model did not end the text itself, so the last call may be incomplete.
        """
        self.stream.is_complete, self.stream.is_cut = True, is_cut
        next(self._steps, None)
        return self._take_parts()

    def read_whole(
        self, text: str, token_ids: Sequence[int] = (), *, is_cut: bool = False
    ) -> list[ParsedDelta]:
        """Read a complete text. It must be the only call of this parser.

        Args:
            text: the text.
            token_ids: its tokens; no built-in parser needs them.
            is_cut: see `finish`.
        """
        return [*self.feed(text, token_ids), *self.finish(is_cut=is_cut)]

    def extract_tool_calls(
        self, model_output: str, request: object = None
    ) -> ExtractedToolCallInformation:
        """Split a complete text. The result is the same as for reading it in pieces.

        Args:
            model_output: one output, without reasoning.
            request: request of the output; its `tools` define the types of arguments.
        """
        parser = type(self)(self.tokenizer)
        parser._tools = getattr(request, "tools", None) or self._tools
        content: list[str] = []
        calls: list[ToolCall] = []
        for delta in [*parser.feed(model_output), *parser.finish()]:
            content.append(delta.content or "")
            for call in delta.tool_calls:
                if "id" in call:
                    calls.append(ToolCall(id=call["id"], function=FunctionCall(**call["function"])))
                else:  # only runs for text that `finish` adds, so at most once
                    calls[-1].function.arguments += call["function"]["arguments"]
        return ExtractedToolCallInformation(
            tools_called=bool(calls), tool_calls=calls, content="".join(content) or None
        )

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: object = None,
    ) -> DeltaMessage | None:
        """Read new text; a method for programs written for vLLM.

        An empty `previous_text` begins another output. Text that may belong to a call is held back.
        The text that is held back at the end of an output is returned only by `finish`.

        Args:
            previous_text: only checked for being empty.
            current_text: not used.
            delta_text: the new text.
            previous_token_ids: not used.
            current_token_ids: not used.
            delta_token_ids: not used.
            request: request of the output; its `tools` define the types of arguments.

        Returns:
            The new content and the new parts of calls; None if there is nothing new.
        """
        if not previous_text:
            self._begin()
        self._tools = getattr(request, "tools", None) or self._tools
        deltas = self.feed(delta_text)
        calls = [call for delta in deltas for call in delta.tool_calls]
        for call in calls:
            function = call["function"]
            if "name" in function:
                self.current_tool_id, self.current_tool_name_sent = call["index"], True
                self.prev_tool_call_arr.append({"name": function["name"], "arguments": ""})
                self.streamed_args_for_tool.append("")
            self.streamed_args_for_tool[-1] += function["arguments"]
            self.prev_tool_call_arr[-1]["arguments"] = self.streamed_args_for_tool[-1]
        if not deltas:
            return None
        content = "".join(delta.content or "" for delta in deltas)
        return DeltaMessage(
            content=content or None, tool_calls=[DeltaToolCall(**call) for call in calls]
        )

    # --- For formats ---

    def read_calls(self, marker: str) -> Wait[None]:
        """Read calls from `stream` at the position where they should begin. Subclasses implement
        this.

        Text that this method has read and that is neither accepted nor part of a call becomes
        content when it returns. So it returns as soon as the text does not match the format.

        Args:
            marker: the marker of `markers` that was just read; empty for calls without a marker.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define read_calls")

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a call. All text read until now belongs to it.

        Args:
            name: name of the function.
            call_id: id that the model wrote; None: create a new one.
        """
        self.accept()
        self._blank.clear()
        self._is_blank = True
        self._index += 1
        call_id = call_id or self.make_id(name, self._index)
        self._parts.append(_Part(self._index, {"id": call_id, "name": name}))

    def add_arguments(self, text: str) -> None:
        """Add JSON text to the arguments of the last call. All text read until now belongs to the
        call.
        """
        self.accept()
        self._add(self._index, text)

    def accept(self) -> None:
        """Treat all text read since the last accepted text as part of the format, not as
        content.
        """
        self.stream.pop_read()

    def release(self) -> None:
        """Treat all text that was read and not accepted as content."""
        self._add_content(self.stream.pop_read())

    def make_id(self, name: str, index: int) -> str:
        """Return a new id for a call.

        Args:
            name: name of the function.
            index: number of earlier calls: in this output or, if the call is required by the
                request, in the whole conversation.
        """
        return random_tool_call_id()

    def parameters_of(self, name: str) -> Mapping[str, Any] | None:
        """Return the JSON schema of a tool's arguments from the request.

        None: the request has no such tool.
        """
        for tool in self._tools:
            function = _member(tool, "function")
            if _member(function, "name") == name:
                parameters = _member(function, "parameters")
                return parameters if isinstance(parameters, Mapping) else {}
        return None

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
        """Read a marker if one is next, and return it; else return "". Markers take precedence over
        calls without a marker.
        """
        for marker in self.markers:
            if (yield from self.stream.read_literal(marker)):
                return marker
        return ""

    def _pass_content(self, piece: str) -> None:
        self.stream.pop_read()
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
