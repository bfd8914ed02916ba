"""Parse calls written as Python: `[f(a=1), g(b="x")]`. They are read, never executed."""

import re
from collections.abc import Sequence
from typing import ClassVar

from vllm.entrypoints.openai.tool_parsers.base import ToolParser
from vllm.entrypoints.openai.tool_parsers.json_reader import PYTHON, read_group
from vllm.entrypoints.openai.tool_parsers.python_literals import arguments_to_json
from vllm.utils.text.text_stream import Wait

_NAME = re.compile(r"[\w.-]+")


class PythonicToolParser(ToolParser):
    """Parses a list of Python calls whose keyword arguments are literals: Llama 3.2 and 4, ToolACE.

    Also calls in a code block `tool_code`, as a list or one after the other: Gemma 3. A call is
    returned when it is complete.
    """

    bare = "["
    markers = ("```tool_code",)
    closing: ClassVar[str] = "```"
    """Comes after the calls that come after a marker."""

    def call_starts(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the markers, and the beginnings of calls without a marker, up to their
        arguments.
        """
        return (*self.markers, *(f"[{name}(" for name in names))

    def read_calls(self, marker: str) -> Wait[None]:
        """Read a list of calls, or after a marker also calls without a list."""
        is_called = False
        if (yield from self.stream.skip_space()) == "[":
            is_called = yield from self.read_list()
        elif marker:
            while (yield from self.read_call()):
                is_called = True
        if is_called and marker:
            yield from self.stream.skip_space()
            if (yield from self.stream.read_literal(self.closing)):
                self.accept()

    def read_list(self) -> Wait[bool]:
        """Read a list of calls after white space. Returns False if there is none, or it is
        incomplete.
        """
        stream = self.stream
        yield from stream.skip_space()
        if not (yield from stream.read_literal("[")):
            return False
        while (yield from self.read_call()):
            char = yield from stream.skip_space()
            if not char or char not in ",]":
                break
            stream.consume(1)
            if char == "]":
                self.accept()
                return True
        return False

    def read_call(self) -> Wait[bool]:
        """Read one call after white space. Returns False if there is none, or it is incomplete."""
        stream = self.stream
        yield from stream.skip_space()
        name = yield from stream.read_run(_NAME)
        if not name or name[0] in "0123456789.-" or (yield from stream.peek()) != "(":
            return False
        pieces: list[str] = []
        if not (yield from read_group(stream, pieces.append, PYTHON)):
            return False
        arguments = arguments_to_json("".join(pieces)[1:-1])
        if arguments is None:
            return False
        self.start_call(name)
        self.add_arguments(arguments)
        return True


class Llama4PythonicToolParser(PythonicToolParser):
    """Parses `[f(a=1)]`, often between `<|python_start|>` and `<|python_end|>`: Llama 4."""

    markers = ("<|python_start|>",)
    closing = "<|python_end|>"
    further_tokens = (closing,)


class Lfm2ToolParser(PythonicToolParser):
    """Parses `<|tool_call_start|>[f(a=1)]<|tool_call_end|>`: LFM2."""

    bare = ""
    markers = ("<|tool_call_start|>",)
    closing = "<|tool_call_end|>"
    further_tokens = (closing,)


class Olmo3ToolParser(PythonicToolParser):
    """Parses calls on lines between `<function_calls>` and `</function_calls>`: Olmo 3."""

    bare = ""
    markers = ("<function_calls>",)
    closing = "</function_calls>"
    further_tokens = (closing,)
