"""Read values from a growing text: JSON, and formats with similar strings and brackets.

Only what is needed to find the end of a value is checked: matching quotes, escapes and brackets.
All other text is passed on unchanged.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from vllm.utils.text.text_stream import TextStream, Wait

Sink = Callable[[str], None]

_IN_STRING = {quote: re.compile(rf"[^{quote}\\]+") for quote in "\"'"}
_SCALAR = re.compile(r"[-+.\w]+")


@dataclass(frozen=True)
class Syntax:
    """Syntax of strings and brackets in a format."""

    closers: dict[str, str]
    """Opening bracket -> closing bracket."""
    quotes: str
    """Characters that open and close a string."""
    plain: "re.Pattern[str]"
    """Text that may be between brackets and strings."""


# Outside a string, "<" begins a marker: the model has left the value unfinished.
JSON = Syntax({"{": "}", "[": "]"}, '"', re.compile(r'[^"{}\[\]<]+'))
PYTHON = Syntax({"{": "}", "[": "]", "(": ")"}, "\"'", re.compile(r"""[^"'{}()\[\]<]+"""))


def read_string(stream: TextStream, sink: Sink) -> Wait[bool]:
    """Read a string with its quotes; the opening quote is next. Returns False if the text ends
    inside it.
    """
    quote = stream.text[stream.position]
    inside = _IN_STRING[quote]
    sink(stream.consume(1))
    while stream.position < len(stream.text) or (yield from stream.more()):
        if run := inside.match(stream.text, stream.position):
            sink(stream.consume(run.end() - stream.position))
        elif stream.text[stream.position] == quote:
            sink(stream.consume(1))
            return True
        elif stream.position + 1 < len(stream.text) or (yield from stream.grow()):
            sink(stream.consume(2))  # a backslash and the character that it escapes
        else:
            sink(stream.consume(1))
    return False


def read_group(stream: TextStream, sink: Sink, syntax: Syntax) -> Wait[bool]:
    """Read from an opening bracket, which is next, to the closing one.

    Returns:
        False if the text ends before, or has a bracket that does not match; reading stops there.
    """
    expected: list[str] = []
    while stream.position < len(stream.text) or (yield from stream.more()):
        char = stream.text[stream.position]
        if closer := syntax.closers.get(char):
            expected.append(closer)
            sink(stream.consume(1))
        elif char in syntax.quotes:
            yield from read_string(stream, sink)
        elif char == expected[-1]:
            expected.pop()
            sink(stream.consume(1))
            if not expected:
                return True
        elif run := syntax.plain.match(stream.text, stream.position):
            sink(stream.consume(run.end() - stream.position))
        else:
            return False
    return False


def read_value(stream: TextStream, sink: Sink) -> Wait[bool]:
    """Read any JSON value after white space. Returns False if there is none, or it does not end."""
    char = yield from stream.skip_space()
    if char == '"':
        return (yield from read_string(stream, sink))
    if char and char in JSON.closers:
        return (yield from read_group(stream, sink, JSON))
    scalar = yield from stream.read_run(_SCALAR)
    sink(scalar)
    return bool(scalar)


def read_text(stream: TextStream) -> Wait[str | None]:
    """Read a JSON string after white space, and return its value; None if there is none."""
    if (yield from stream.skip_space()) != '"':
        return None
    pieces: list[str] = []
    is_closed = yield from read_string(stream, pieces.append)
    return decode_string("".join(pieces)) if is_closed else None


def decode_string(literal: str) -> str | None:
    """Return the value of a JSON string. None: the text is not a JSON string, or has half of a
    surrogate pair.
    """
    try:
        text = cast(str, json.loads(literal, strict=False))
        text.encode()
    except ValueError:  # includes UnicodeEncodeError of an unpaired surrogate
        return None
    return text


def encode_string(text: str) -> str:
    """Encode a text as a JSON string, without escapes if possible (not for half of a surrogate
    pair).
    """
    literal = json.dumps(text, ensure_ascii=False)
    try:
        literal.encode()
    except UnicodeEncodeError:
        return json.dumps(text)
    return literal
