"""Calls as Qwen3-Coder writes them: tags, and values as plain text."""

import json
import re
from collections.abc import Mapping
from typing import Any

from vllm.entrypoints.openai.tool_parsers.base import ToolParser
from vllm.entrypoints.openai.tool_parsers.json_reader import encode_string
from vllm.utils.text.text_stream import Markers, Wait

_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"
# A model may leave out the end of a parameter.
_VALUE_ENDS = Markers((_PARAMETER_END, _PARAMETER, _FUNCTION_END))
_NAME = re.compile(r"[^<>\n]+")


class Qwen3CoderToolParser(ToolParser):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

    Values are passed on one by one. They are strings where the request's tool says so; else what
    is JSON stays JSON, and all others are strings.
    """

    markers = ("<tool_call>", _FUNCTION)
    further_tokens = ("</tool_call>",)

    def read_calls(self, marker: str) -> Wait[None]:
        """See `ToolParser.read_calls`."""
        stream = self.stream
        if marker != _FUNCTION:
            yield from stream.skip_space()
            if not (yield from stream.read_literal(_FUNCTION)):
                return
        name = (yield from stream.read_run(_NAME)).strip()
        if not name or not (yield from stream.read_literal(">")):
            return
        num_parameters = yield from self._read_parameters(name)
        if not (yield from stream.peek()):
            return  # the end of the text; unfinished arguments stay so, for all to see
        if (yield from stream.read_literal(_FUNCTION_END)):
            if not num_parameters:
                self.start_call(name)
                self.add_arguments("{")
        elif not num_parameters:
            return
        self.add_arguments("}")
        yield from stream.skip_space()
        if (yield from stream.read_literal("</tool_call>")):
            self.accept()

    def _read_parameters(self, name: str) -> Wait[int]:
        """Read parameters and pass them on; returns how many. The first one begins the call."""
        stream = self.stream
        properties = self.properties_of(name)
        num_parameters = 0
        while True:
            yield from stream.skip_space()
            if not (yield from stream.read_literal(_PARAMETER)):
                return num_parameters
            key = (yield from stream.read_run(_NAME)).strip()
            if not key or not (yield from stream.read_literal(">")):
                return num_parameters
            pieces: list[str] = []
            if not (yield from stream.read_until(_VALUE_ENDS, pieces.append)):
                return num_parameters
            yield from stream.read_literal(_PARAMETER_END)
            if not num_parameters:
                self.start_call(name)
            opening = ", " if num_parameters else "{"
            value = _to_json("".join(pieces), properties.get(key))
            self.add_arguments(f"{opening}{encode_string(key)}: {value}")
            num_parameters += 1


def _to_json(text: str, schema: Any) -> str:
    """A value as JSON; by its schema, if there is one that says it is a string."""
    text = text.removeprefix("\n").removesuffix("\n")
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return encode_string(text)
    try:
        json.loads(text, parse_constant=_refuse)
        text.encode()
    except (ValueError, RecursionError):
        literal = {"True": "true", "False": "false", "None": "null"}.get(text.strip())
        return literal or encode_string(text)
    return text.strip()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
