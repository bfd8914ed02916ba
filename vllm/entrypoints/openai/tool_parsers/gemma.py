"""Parse tool calls of Gemma models: keys without quotes, and strings between escape markers."""

import re
from functools import cached_property
from typing import ClassVar

from vllm.entrypoints.openai.tool_parsers.argument_types import argument_to_json
from vllm.entrypoints.openai.tool_parsers.base import ToolParser
from vllm.entrypoints.openai.tool_parsers.json_reader import encode_string
from vllm.utils.text.text_stream import Markers, Wait

_NAME = re.compile(r"[\w.-]+")
_KEY = re.compile(r"[^\s:,{}\[\]<]+")
_SCALAR = re.compile(r"[^\s,{}\[\]<]+")
_CLOSERS = {"{": "}", "[": "]"}


class FunctionGemmaToolParser(ToolParser):
    """Parses
    `<start_function_call>call:NAME{KEY:<escape>TEXT<escape>,KEY:1}<end_function_call>`.
    """

    call_end: ClassVar[str] = "<end_function_call>"
    """Comes after the arguments of a call."""
    escape: ClassVar[str] = "<escape>"
    """Comes before and after a text."""
    markers = ("<start_function_call>",)
    further_tokens = (call_end, escape)

    @cached_property
    def _text_ends(self) -> Markers:
        return Markers((self.escape, self.call_end))

    def read_calls(self, marker: str) -> Wait[None]:
        """Read the call after a marker."""
        stream = self.stream
        yield from stream.skip_space()
        if not (yield from stream.read_literal("call:")):
            return
        name = yield from stream.read_run(_NAME)
        if not name or (yield from stream.peek()) != "{":
            return
        self.start_call(name)
        yield from self._read_group()
        yield from stream.skip_space()
        if (yield from stream.read_literal(self.call_end)):
            self.accept()

    def _read_group(self) -> Wait[None]:
        """Read the next object and return it as JSON; stop where it is damaged."""
        stream = self.stream
        expected: list[str] = []
        is_after_value = False
        while char := (yield from stream.skip_space()):
            if expected and char == expected[-1]:
                self.add_arguments(stream.consume(1))
                expected.pop()
                if not expected:
                    return
                is_after_value = True
                continue
            if is_after_value:
                if char != ",":
                    return
                stream.consume(1)
                self.add_arguments(", ")
                is_after_value = False
                continue
            if expected and expected[-1] == "}":
                key = yield from stream.read_run(_KEY)
                if not key or not (yield from stream.read_literal(":")):
                    return
                self.add_arguments(f"{encode_string(key)}: ")
                char = yield from stream.skip_space()
            if char in _CLOSERS:
                expected.append(_CLOSERS[char])
                self.add_arguments(stream.consume(1))
            elif not (yield from self._read_scalar()):
                return
            else:
                is_after_value = True

    def _read_scalar(self) -> Wait[bool]:
        """Read a text between escape markers, a number or a word. Returns False if it is
        damaged.
        """
        stream = self.stream
        if (yield from stream.read_literal(self.escape)):
            self.add_arguments('"')
            yield from stream.read_until(self._text_ends, self._add_text)
            if not (yield from stream.read_literal(self.escape)):
                return False
            self.add_arguments('"')
            return True
        scalar = yield from stream.read_run(_SCALAR)
        if scalar:
            self.add_arguments(argument_to_json(scalar, "", None))
        return bool(scalar)

    def _add_text(self, piece: str) -> None:
        self.add_arguments(encode_string(piece)[1:-1])


class Gemma4ToolParser(FunctionGemmaToolParser):
    """Parses `<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:1}<tool_call|>`: Gemma 4."""

    call_end, escape = "<tool_call|>", '<|"|>'
    markers = ("<|tool_call>",)
    further_tokens = (call_end, escape)
