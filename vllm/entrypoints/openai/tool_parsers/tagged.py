"""Parse calls whose name, keys and values are between tags, with values as plain text.

All such formats have the same structure: a tag with the name, then keys and values, then an end.
Only the tags differ.
"""

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from vllm.entrypoints.openai.tool_parsers.argument_types import argument_to_json, is_text
from vllm.entrypoints.openai.tool_parsers.base import ToolParser
from vllm.entrypoints.openai.tool_parsers.json_calls import JsonToolParser
from vllm.entrypoints.openai.tool_parsers.json_reader import encode_string
from vllm.utils.text.text_stream import Markers, Wait

_HEAD = re.compile(r"[^<>\n]+")
"""The text in a tag: a name or a key, with or without quotes, and attributes."""
_NAME = re.compile(r"[^\s<>{}\[\]\"']+")
_QUOTED = re.compile(r'\s*"([^"]*)"(.*)', re.DOTALL)


Schema = Mapping[str, Any] | None
"""The JSON schema of a tool's arguments; None: there is no such tool."""


class TaggedToolParser(ToolParser):
    """Parses calls that are written with tags before and after the name, keys and values.

    Arguments get the types of the tool's schema. A string is returned as the model writes it, and
    another value when it is complete. A call begins with the key of its first argument.

    A subclass defines the tags. A model may put several calls between two further tags, or write
    them without; so `call_start` is one of the `markers`, as the opening tag around the calls is.
    """

    call_start: ClassVar[str]
    """Comes before a name."""
    name_end: ClassVar[str] = ">"
    """Comes after a name; empty: nothing does."""
    key_start: ClassVar[str]
    """Comes before a key."""
    key_ends: ClassVar[tuple[str, ...]] = (">",)
    """Come between a key and its value, with white space around all but the last."""
    value_end: ClassVar[str]
    """Comes after a value. A model may leave it out before another key and at the call's end."""
    call_end: ClassVar[str]
    """Comes after the last value."""
    before_call: ClassVar[tuple[str, ...]] = ()
    """Texts that may come between a marker and the start of a call."""
    after_call: ClassVar[tuple[str, ...]] = ()
    """Texts that may come after a call."""
    value_margin: ClassVar[str] = "\n"
    """Left out once at the beginning and at the end of a value."""

    @cached_property
    def _value_ends(self) -> Markers:
        return Markers((self.value_end, self.key_start, self.call_end))

    def read_calls(self, marker: str) -> Wait[None]:
        """Read the calls after a marker."""
        stream = self.stream
        if marker != self.call_start:
            while (yield from self._read_one(self.before_call)):
                pass
            if not (yield from stream.read_literal(self.call_start)):
                return
        if (yield from self.read_call()):
            while (yield from self._read_one(self.after_call)):
                self.accept()

    def read_call(self) -> Wait[bool]:
        """Read a call after its start tag. Returns False if there is none, or the text has
        ended.
        """
        stream = self.stream
        yield from stream.skip_space()
        name, _ = _unquoted((yield from stream.read_run(_HEAD)))
        if not _NAME.fullmatch(name) or not (yield from stream.read_literal(self.name_end)):
            return False
        num_arguments = yield from self._read_tags(name)
        if not (yield from stream.peek()):
            return False  # leave incomplete arguments incomplete, so that clients can see it
        if (yield from stream.read_literal(self.call_end)):
            if not num_arguments:
                self.start_call(name)
                self.add_arguments("{")
        elif not num_arguments or self._is_cut():
            return False
        self.add_arguments("}")
        return True

    def _is_cut(self) -> bool:
        """Return whether the text ends inside a tag, which may have begun another argument."""
        rest = self.stream.text[self.stream.position :]
        return self.stream.is_complete and rest.startswith("<") and ">" not in rest

    def _read_tags(self, name: str) -> Wait[int]:
        """Read the arguments and return how many there are. The first key begins the call."""
        stream = self.stream
        parameters = self.parameters_of(name)
        num_arguments = 0
        while True:
            yield from stream.skip_space()
            if not (yield from stream.read_literal(self.key_start)):
                return num_arguments
            key, attributes = _unquoted((yield from stream.read_run(_HEAD)))
            if not key or not (yield from self._read_key_ends()):
                return num_arguments
            if not num_arguments:
                self.start_call(name)
            opening = ", " if num_arguments else "{"
            self.add_arguments(f"{opening}{encode_string(key)}: ")
            num_arguments += 1
            if self.is_text(key, attributes, parameters):
                is_complete = yield from self._read_text()
            else:
                is_complete = yield from self._read_value(key, attributes, parameters)
            if not is_complete:
                return num_arguments
            yield from stream.read_literal(self.value_end)

    def _read_text(self) -> Wait[bool]:
        """Read a value that is a string, in pieces. Returns False if the text ends before it."""
        held = ""

        def add(piece: str) -> None:
            nonlocal held
            piece, held = held + piece, ""
            if self.value_margin and piece.endswith(self.value_margin):
                piece, held = piece.removesuffix(self.value_margin), self.value_margin
            self.add_arguments(encode_string(piece)[1:-1])

        self.add_arguments('"')
        if self.value_margin:
            yield from self.stream.read_literal(self.value_margin)
        if not (yield from self.stream.read_until(self._value_ends, add)):
            return False
        self.add_arguments('"')
        return True

    def _read_value(self, key: str, attributes: str, parameters: Schema) -> Wait[bool]:
        """Read a value of any type. Returns False if the text ends before it."""
        pieces: list[str] = []
        is_complete = yield from self.stream.read_until(self._value_ends, pieces.append)
        text = "".join(pieces).removeprefix(self.value_margin)
        if is_complete:
            text = text.removesuffix(self.value_margin)
            text = self.to_json(text, key, attributes, parameters)
        self.add_arguments(text)
        return bool(is_complete)

    def is_text(self, key: str, attributes: str, parameters: Schema) -> bool:
        """Return whether a value must be a string. The arguments are the same as for `to_json`."""
        return is_text(key, parameters)

    def to_json(self, text: str, key: str, attributes: str, parameters: Schema) -> str:
        """Return the JSON text of a value.

        Args:
            text: text of the value.
            key: name of the argument.
            attributes: text after the name in the tag of the key.
            parameters: schema of the tool's arguments, or None.
        """
        return argument_to_json(text, key, parameters)

    def _read_key_ends(self) -> Wait[bool]:
        *between, last = self.key_ends
        for text in between:
            if not (yield from self.stream.read_literal(text)):
                return False
            yield from self.stream.skip_space()
        return (yield from self.stream.read_literal(last))

    def _read_one(self, texts: tuple[str, ...]) -> Wait[bool]:
        """Read white space and one of these texts, if it is next. Returns whether it was."""
        yield from self.stream.skip_space()
        for text in texts:
            if (yield from self.stream.read_literal(text)):
                return True
        return False


def _unquoted(head: str) -> tuple[str, str]:
    """Return the name and the attributes in a tag."""
    quoted = _QUOTED.fullmatch(head)
    return (quoted[1], quoted[2]) if quoted else (head.strip(), "")


class Qwen3CoderToolParser(TaggedToolParser):
    """Parses
    `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.
    """

    call_start, call_end = "<function=", "</function>"
    key_start, value_end = "<parameter=", "</parameter>"
    markers = ("<tool_call>", call_start)
    further_tokens = ("</tool_call>",)
    after_call = ("</tool_call>",)


class SeedOssToolParser(Qwen3CoderToolParser):
    """Parses `<seed:tool_call><function=NAME>...</function></seed:tool_call>`: Seed-OSS."""

    markers = ("<seed:tool_call>", Qwen3CoderToolParser.call_start)
    further_tokens = ("</seed:tool_call>",)
    after_call = ("</seed:tool_call>",)


class MiniMaxM2ToolParser(TaggedToolParser):
    """Parses `<minimax:tool_call><invoke name="NAME"><parameter
    name="KEY">VALUE</parameter></invoke>`.
    """

    call_start, call_end = "<invoke name=", "</invoke>"
    key_start, value_end = "<parameter name=", "</parameter>"
    markers = ("<minimax:tool_call>", call_start)
    further_tokens = ("</minimax:tool_call>",)
    after_call = ("</minimax:tool_call>",)
    value_margin = ""


_BEGIN, _END, _SEPARATOR = (
    tuple(f"<{bar}{word}{bar}>" for bar in ("\uff5c", "|") for word in words)
    for words in (
        ("tool_calls_begin", "tool_call_begin"),
        ("tool_calls_end", "tool_call_end"),
        ("tool_sep",),
    )
)


class Step3ToolParser(TaggedToolParser):
    """Parses `<steptml:invoke name="NAME"><steptml:parameter name="KEY">VALUE</steptml:parameter>`
    with its end tag: Step-3.

    The calls are in a list, and each begins with a type and a separator.
    """

    call_start, call_end = "<steptml:invoke name=", "</steptml:invoke>"
    key_start, value_end = "<steptml:parameter name=", "</steptml:parameter>"
    markers = (*_BEGIN, call_start)
    further_tokens = (*_END, *_SEPARATOR)
    before_call = (*_BEGIN, "function", *_SEPARATOR)
    after_call = (*_END, *_SEPARATOR)
    value_margin = ""


_DSML = "\uff5cDSML\uff5c"


class DeepSeekV32ToolParser(TaggedToolParser):
    """Parses `<DSML invoke name="NAME"><DSML parameter name="KEY" string="true">VALUE`: DeepSeek
    V3.2, V4.

    The tag says whether a value is a string or JSON.
    """

    call_start, call_end = f"<{_DSML}invoke name=", f"</{_DSML}invoke>"
    key_start, value_end = f"<{_DSML}parameter name=", f"</{_DSML}parameter>"
    markers = (f"<{_DSML}function_calls>", f"<{_DSML}tool_calls>", call_start)
    further_tokens = (f"</{_DSML}function_calls>", f"</{_DSML}tool_calls>", _DSML)
    after_call = further_tokens[:2]
    value_margin = ""

    def is_text(self, key: str, attributes: str, parameters: Schema) -> bool:
        """Return whether a value must be a string; its tag may say so."""
        if 'string="' in attributes:
            return 'string="true"' in attributes
        return super().is_text(key, attributes, parameters)

    def to_json(self, text: str, key: str, attributes: str, parameters: Schema) -> str:
        """Return the JSON text of a value that may be something else than a string."""
        if 'string="false"' in attributes:
            parameters = None  # JSON arguments need no conversion of types
        return super().to_json(text, key, attributes, parameters)


class Glm45ToolParser(TaggedToolParser):
    """Parses `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`: GLM
    4.5 and later.
    """

    call_start, call_end = "<tool_call>", "</tool_call>"
    name_end = ""
    key_start, value_end = "<arg_key>", "</arg_value>"
    key_ends = ("</arg_key>", "<arg_value>")
    markers = (call_start,)
    further_tokens = (call_end, key_start, value_end, *key_ends)
    value_margin = ""


class LongCatToolParser(TaggedToolParser, JsonToolParser):
    """Parses JSON, or keys and values, between `longcat_tool_call` tags: LongCat-Flash."""

    call_start, call_end = "<longcat_tool_call>", "</longcat_tool_call>"
    name_end = ""
    key_start, value_end = "<longcat_arg_key>", "</longcat_arg_value>"
    key_ends = ("</longcat_arg_key>", "<longcat_arg_value>")
    markers = (call_start,)
    further_tokens = (call_end, key_start, value_end, *key_ends)
    closing = (call_end,)
    value_margin = ""

    def read_calls(self, marker: str) -> Wait[None]:
        """Read the calls after a marker."""
        is_json = (yield from self.stream.skip_space()) == "{"
        kind: type[ToolParser] = JsonToolParser if is_json else TaggedToolParser
        yield from kind.read_calls(self, marker)
