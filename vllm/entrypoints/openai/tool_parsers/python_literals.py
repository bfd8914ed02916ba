"""Convert Python keyword arguments to JSON. The reader is linear in the text, and executes
nothing.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from vllm.entrypoints.openai.tool_parsers.json_reader import encode_string

_TOKEN = re.compile(
    r"""
    \s*(?:
        (?P<string>
            '{3}[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'{3}
          | "{3}[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"{3}
          | '[^'\\]*(?:\\.[^'\\]*)*'
          | "[^"\\]*(?:\\.[^"\\]*)*"
        )
      | (?P<number>[-+]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)(?:[eE][-+]?\d+)?(?!\w))
      | (?P<word>[^\W\d]\w*)
      | (?P<sign>[=,:()\[\]{}])
    )\s*
    """,
    re.VERBOSE | re.DOTALL,
)
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_WORDS = {"True": "true", "False": "false", "None": "null"} | {
    word: word for word in ("true", "false", "null")
}
_ESCAPE = re.compile(
    r"""\\(?:([\\'"abfnrtv\n])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3}))"""
)
_ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""}

_CALL, _DICT, _LIST, _TUPLE = "", "}", "]", ")"
"""Kinds of containers, by the bracket that closes them; a call is closed by no bracket here."""
_OPENERS = {"{": _DICT, "[": _LIST, "(": _TUPLE}


@dataclass(slots=True)
class _Level:
    """An open bracket, and how much of its content was read."""

    kind: str
    num_items: int = 0
    has_comma: bool = False
    is_after_value: bool = False


def arguments_to_json(text: str) -> str | None:
    """Convert keyword arguments to a JSON object.

    Args:
        text: text between the brackets of a call, such as `a=1, b=[None, 'x']`.

    Returns:
        The object, written as `json.dumps` would write it. None: the text contains something that
            is not a literal, or an argument without a keyword.
    """
    return _Translator(text).translate()


class _Translator:
    """Translates the text of keyword arguments once."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._levels = [_Level(_CALL)]
        self._out = ["{"]

    def translate(self) -> str | None:
        for kind, token in self._tokens:
            level = self._levels[-1]
            if kind == "sign" and token == level.kind:
                is_read = self._close(level)
            elif level.is_after_value:
                is_read = (kind, token) == ("sign", ",")
                level.is_after_value, level.has_comma = False, True
            else:
                is_read = self._begin_item(level, kind, token)
            if not is_read:
                return None
        return "".join([*self._out, "}"]) if len(self._levels) == 1 else None

    def _close(self, level: _Level) -> bool:
        self._levels.pop()
        self._levels[-1].is_after_value = True
        self._out.append("}" if level.kind == _DICT else "]")
        # Parentheses around a single value without a comma do not make a tuple.
        return level.kind != _TUPLE or level.num_items != 1 or level.has_comma

    def _begin_item(self, level: _Level, kind: str, token: str) -> bool:
        """Read a key if one is expected, and a value or its opening bracket."""
        if level.num_items:
            self._out.append(", ")
        level.num_items += 1
        if level.kind in (_CALL, _DICT):
            if level.kind == _CALL:
                key, equals = encode_string(token) if kind == "word" else None, "="
            else:
                key, equals = _key(kind, token), ":"
            if key is None or next(self._tokens, None) != ("sign", equals):
                return False
            self._out += (key, ": ")
            kind, token = next(self._tokens, ("", ""))
        if kind == "sign" and token in _OPENERS:
            self._out.append("{" if token == "{" else "[")
            self._levels.append(_Level(_OPENERS[token]))
            return True
        value = _scalar(kind, token)
        level.is_after_value = True
        if value is not None:
            self._out.append(value)
        return value is not None


def _key(kind: str, token: str) -> str | None:
    """Convert the key of a dict to a JSON string."""
    scalar = _scalar(kind, token)
    return scalar if scalar is None or kind == "string" else encode_string(scalar)


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """Yield (kind, token) in order; the kind is empty if the text at this position is not a
    token.
    """
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            if text[position:].strip():
                yield "", ""
            return
        yield str(match.lastgroup), match.group(str(match.lastgroup))
        position = match.end()


def _scalar(kind: str, token: str) -> str | None:
    """Convert a string, a number or a constant to JSON."""
    if kind == "string":
        return encode_string(_string_value(token))
    if kind == "number":
        return _number(token)
    return _WORDS.get(token) if kind == "word" else None


def _number(token: str) -> str | None:
    if _JSON_NUMBER.fullmatch(token):
        return token
    try:
        try:
            return json.dumps(int(token))
        except ValueError:
            value = float(token)
            return json.dumps(value) if math.isfinite(value) else None
    except ValueError:
        return None


def _string_value(literal: str) -> str:
    num_quotes = 3 if literal[:3] in ("'''", '"""') and len(literal) >= 6 else 1
    return _ESCAPE.sub(_unescape, literal[num_quotes:-num_quotes])


def _unescape(match: "re.Match[str]") -> str:
    letter, *codes, octal = match.groups()
    if letter:
        return _ESCAPED.get(letter, letter)
    code = int(octal, 8) if octal else int(next(filter(None, codes)), 16)
    return chr(code) if code <= 0x10FFFF else match.group()
