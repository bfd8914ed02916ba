"""Parse calls written as JSON: `{"name": ..., "arguments": {...}}`, one, several, or an array of
them.
"""

import itertools
import json
from collections.abc import Sequence
from typing import ClassVar

from vllm.entrypoints.openai.tool_parsers.base import ToolParser
from vllm.entrypoints.openai.tool_parsers.json_reader import (
    JSON,
    decode_string,
    read_group,
    read_string,
    read_text,
    read_value,
)
from vllm.utils.text.text_stream import Wait

_ARGUMENT_KEYS = ("arguments", "parameters")


class JsonToolParser(ToolParser):
    """Parses calls that are objects with `name` and `arguments` or `parameters`.

    A call begins as soon as both keys are found; from then on its arguments are returned as the
    model writes them. An object without arguments is a call only after a marker.
    """

    closing: ClassVar[tuple[str, ...]] = ()
    """Text that may follow the calls; left out of the content."""
    separators: ClassVar[tuple[str, ...]] = ()
    """Texts of which one comes between objects that are in no array; the last one may be empty.
    With no texts, there is one object only."""
    name_key: ClassVar[str | None] = "name"
    """The key of the name of a call. None: the key of the arguments is the name."""

    def call_starts(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the markers, and the beginnings of calls without a marker, up to their
        arguments.
        """
        starts = list(self.markers)
        for opening in self.bare:
            bracket = "" if opening == "{" else opening
            for name, key in itertools.product(map(json.dumps, names), _ARGUMENT_KEYS):
                starts.append(f'{bracket}{{"name": {name}, "{key}": {{')
                starts.append(f'{bracket}{{"name":{name},"{key}":{{')
        return tuple(starts)

    def read_calls(self, marker: str) -> Wait[None]:
        """Read the JSON calls after a marker, or without one, and the closing text if there is
        one.
        """
        if (yield from self.read_json(is_marked=bool(marker))):
            yield from self.read_closing(*self.closing)

    def read_json(self, *, is_marked: bool) -> Wait[bool]:
        """Read an array of calls, one call, or calls with separators. Returns False if there is no
        call.

        Args:
            is_marked: a marker came before; otherwise an object must have arguments to be a call.
        """
        char = yield from self.stream.skip_space()
        if char == "[":
            return (yield from self._read_array(is_marked))
        if char != "{" or not (yield from self._read_object(is_marked)):
            return False
        while (yield from self._read_separator()):
            if (yield from self.stream.skip_space()) != "{":
                break
            if not (yield from self._read_object(is_marked)):
                break
        return True

    def _read_separator(self) -> Wait[bool]:
        """Read a text between objects after white space, if it is there. Returns whether it was."""
        yield from self.stream.skip_space()
        for text in self.separators:
            if (yield from self.stream.read_literal(text)):
                return True
        return False

    def read_closing(self, *texts: str) -> Wait[None]:
        """Read one of these closing texts after white space, if it is there."""
        yield from self.stream.skip_space()
        for text in texts:
            if (yield from self.stream.read_literal(text)):
                self.accept()
                return

    def _read_array(self, is_marked: bool) -> Wait[bool]:
        stream = self.stream
        stream.consume(1)
        is_called = False
        while (yield from stream.skip_space()) == "{":
            if not (yield from self._read_object(is_marked)):
                return is_called
            is_called = True
            char = yield from stream.skip_space()
            if char and char in ",]":
                stream.consume(1)
            if char == "]":
                self.accept()
            if char != ",":
                break
        return is_called

    def _read_object(self, is_marked: bool) -> Wait[bool]:
        """Read an object, whose bracket is next. Returns False if it is not a call."""
        stream = self.stream
        stream.consume(1)
        call = _Call(self)
        if (yield from stream.skip_space()) != "}":
            while (yield from self._read_member(call)):
                if (yield from stream.skip_space()) != ",":
                    break
                stream.consume(1)
        if (yield from stream.skip_space()) != "}":
            return call.is_started
        stream.consume(1)
        if is_marked and not call.has_arguments and not call.is_damaged:
            call.add_arguments("{}")
        if call.is_started:
            self.accept()
        return call.is_started

    def _read_member(self, call: "_Call") -> Wait[bool]:
        """Read a key and its value. Returns False if they are not next."""
        stream = self.stream
        key = yield from read_text(stream)
        if key is None or (yield from stream.skip_space()) != ":":
            return False
        stream.consume(1)
        if self.name_key is None:
            if not key or call.name:
                return False
            call.set_name(key)
            return (yield from self._read_arguments(call))
        if key == self.name_key and not call.name:
            name = yield from read_text(stream)
            if not name:
                return False
            call.set_name(name)
            return True
        if key in _ARGUMENT_KEYS and not call.has_arguments:
            return (yield from self._read_arguments(call))
        return (yield from read_value(stream, _ignore))

    def _read_arguments(self, call: "_Call") -> Wait[bool]:
        """Read the arguments: an object, null, or an object that was written into a string."""
        stream = self.stream
        char = yield from stream.skip_space()
        if char == "{":
            return (yield from read_group(stream, call.add_arguments, JSON))
        pieces: list[str] = []
        if char == '"' and (yield from read_string(stream, pieces.append)):
            decoded = decode_string("".join(pieces))
            text = "" if decoded is None else decoded.strip() or "{}"
        elif char == "n" and (yield from stream.read_literal("null")):
            text = "{}"
        else:
            text = ""
        call.is_damaged = not text.startswith("{")
        if call.is_damaged:
            return False
        call.add_arguments(text)
        return True


class _Call:
    """A call in reading, whose name and arguments may be in either order."""

    def __init__(self, parser: ToolParser) -> None:
        self.name = ""
        self.has_arguments = False
        self.is_damaged = False
        """Whether its arguments are not an object, so that it must not be called without them."""
        self._parser = parser
        self._held: list[str] = []

    @property
    def is_started(self) -> bool:
        return bool(self.name) and self.has_arguments

    def set_name(self, name: str) -> None:
        self.name = name
        if self.has_arguments:
            self._start()

    def add_arguments(self, text: str) -> None:
        is_first = not self.has_arguments
        self.has_arguments = True
        self._held.append(text)
        if self.name and is_first:
            self._start()
        elif self.name:
            self._pass()

    def _start(self) -> None:
        self._parser.start_call(self.name)
        self._pass()

    def _pass(self) -> None:
        self._parser.add_arguments("".join(self._held))
        self._held.clear()


def _ignore(text: str) -> None:
    """Ignore a value that is not needed."""
