"""Calls as DeepSeek models write them."""

import re

from vllm.entrypoints.openai.tool_parsers.base import ToolParser
from vllm.entrypoints.openai.tool_parsers.json_reader import JSON, read_group
from vllm.utils.text.text_stream import Wait

# The bars are U+FF5C and the lines U+2581, as in the models' vocabulary.
_CALLS_BEGIN = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_CALLS_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"
_CALL_BEGIN = "<\uff5ctool\u2581call\u2581begin\uff5c>"
_CALL_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"

_HEADER = re.compile(r"[^<\n]+")
_NAME = re.compile(r"[^<`{\n]+")


class DeepSeekToolParser(ToolParser):
    """Calls in a list between begin and end markers: DeepSeek V3, V3.1 and R1.

    V3 writes a type, a separator, the name, and the arguments in a fence; V3.1 writes the name, a
    separator, and the arguments.
    """

    markers = (_CALLS_BEGIN, _CALL_BEGIN)
    further_tokens = (_CALLS_END, _CALL_END, _SEPARATOR)

    def read_calls(self, marker: str) -> Wait[None]:
        """See `ToolParser.read_calls`."""
        stream = self.stream
        is_open = marker == _CALL_BEGIN
        if not is_open:
            yield from stream.skip_space()
            is_open = yield from stream.read_literal(_CALL_BEGIN)
        while is_open and (yield from self._read_call()):
            yield from stream.skip_space()
            if (yield from stream.read_literal(_CALLS_END)):
                self.accept()
                return
            is_open = yield from stream.read_literal(_CALL_BEGIN)

    def _read_call(self) -> Wait[bool]:
        """Read one call behind its begin marker. False: it is not complete, or none."""
        stream = self.stream
        name = yield from stream.read_run(_HEADER)
        if not (yield from stream.read_literal(_SEPARATOR)):
            return False
        if (yield from stream.skip_space()) != "{":
            name = yield from stream.read_run(_NAME)
            yield from self._read_fence()
        name = name.strip()
        if not name or (yield from stream.skip_space()) != "{":
            return False
        self.start_call(name)
        if not (yield from read_group(stream, self.add_arguments, JSON)):
            # A marker in the middle of the arguments: the next call may be right.
            return (yield from self._read_end())
        yield from self._read_fence()
        return (yield from self._read_end())

    def _read_fence(self) -> Wait[None]:
        yield from self.stream.skip_space()
        if (yield from self.stream.read_literal("```")):
            yield from self.stream.read_literal("json")

    def _read_end(self) -> Wait[bool]:
        yield from self.stream.skip_space()
        is_closed = yield from self.stream.read_literal(_CALL_END)
        if is_closed:
            self.accept()
        return is_closed
