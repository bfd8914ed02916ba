"""Parse calls in a list between begin and end markers, each with a header and JSON arguments."""

import re
from typing import ClassVar

from vllm.entrypoints.openai.tool_parsers.base import ToolParser
from vllm.entrypoints.openai.tool_parsers.json_reader import JSON, read_group
from vllm.utils.text.text_stream import Wait

_HEADER = re.compile(r"[^<\n]+")
_NAME = re.compile(r"[^<`{\n]+")
_KIMI_ID = re.compile(r"\s*((?:functions\.)?([\w.-]+):\d+)\s*")


class ListedToolParser(ToolParser):
    """Parses a list of calls, each with a header, a separator and JSON arguments. A subclass
    defines the markers.
    """

    calls_begin: ClassVar[str]
    calls_end: ClassVar[str]
    call_begin: ClassVar[str]
    call_end: ClassVar[str]
    separator: ClassVar[str]
    """Comes after the header of a call."""

    def read_calls(self, marker: str) -> Wait[None]:
        """Read the calls after a marker."""
        stream = self.stream
        is_open = marker == self.call_begin
        if not is_open:
            yield from stream.skip_space()
            is_open = yield from stream.read_literal(self.call_begin)
        while is_open and (yield from self._read_call()):
            yield from stream.skip_space()
            if (yield from stream.read_literal(self.calls_end)):
                self.accept()
                return
            is_open = yield from stream.read_literal(self.call_begin)

    def read_name(self, header: str) -> Wait[tuple[str, str | None]]:
        """Return the name and the id of a call, whose header was just read. Without an id (None), a
        new one is created.
        """
        yield from ()
        return header.strip(), None

    def read_fence(self) -> Wait[None]:
        """Read the text that may surround the arguments."""
        yield from ()

    def _read_call(self) -> Wait[bool]:
        """Read one call after its begin marker. Returns False if there is no complete call."""
        stream = self.stream
        header = yield from stream.read_run(_HEADER)
        if not (yield from stream.read_literal(self.separator)):
            return False
        name, call_id = yield from self.read_name(header)
        if not name or (yield from stream.skip_space()) != "{":
            return False
        self.start_call(name, call_id)
        if not (yield from read_group(stream, self.add_arguments, JSON)):
            # A marker interrupted the arguments. The next call may still be complete.
            return (yield from self._read_end())
        yield from self.read_fence()
        return (yield from self._read_end())

    def _read_end(self) -> Wait[bool]:
        yield from self.stream.skip_space()
        is_closed = yield from self.stream.read_literal(self.call_end)
        if is_closed:
            self.accept()
        return is_closed


class DeepSeekToolParser(ListedToolParser):
    """Parses calls of DeepSeek V3, V3.1 and R1.

    V3 writes a type, a separator, the name, and the arguments in a code fence; V3.1 writes the
    name, a separator, and the arguments.
    """

    # The models' vocabulary uses the characters U+FF5C (bar) and U+2581 (line).
    calls_begin = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
    calls_end = "<\uff5ctool\u2581calls\u2581end\uff5c>"
    call_begin = "<\uff5ctool\u2581call\u2581begin\uff5c>"
    call_end = "<\uff5ctool\u2581call\u2581end\uff5c>"
    separator = "<\uff5ctool\u2581sep\uff5c>"
    markers = (calls_begin, call_begin)
    further_tokens = (calls_end, call_end, separator)

    def read_name(self, header: str) -> Wait[tuple[str, str | None]]:
        """Return the name, which is the header or, if the header is the type, comes after it."""
        if (yield from self.stream.skip_space()) == "{":
            return header.strip(), None
        name = yield from self.stream.read_run(_NAME)
        yield from self.read_fence()
        return name.strip(), None

    def read_fence(self) -> Wait[None]:
        """Read the fence of a code block, if there is one."""
        yield from self.stream.skip_space()
        if (yield from self.stream.read_literal("```")):
            yield from self.stream.read_literal("json")


class KimiK2ToolParser(ListedToolParser):
    """Parses calls of Kimi K2 and later: the header is the call's id, `functions.NAME:NUMBER`.

    The model's chat template shows ids unchanged, so they are kept as the model wrote them.
    """

    calls_begin, calls_end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    call_begin, call_end = "<|tool_call_begin|>", "<|tool_call_end|>"
    separator = "<|tool_call_argument_begin|>"
    markers = (calls_begin, call_begin)
    further_tokens = (calls_end, call_end, separator)

    def make_id(self, name: str, index: int) -> str:
        """Return an id in the form that the model itself writes."""
        return f"functions.{name}:{index}"

    def read_name(self, header: str) -> Wait[tuple[str, str | None]]:
        """Return the name and the id in the header."""
        yield from ()
        found = _KIMI_ID.fullmatch(header)
        return (found[2], found[1]) if found else (header.strip().removeprefix("functions."), None)
