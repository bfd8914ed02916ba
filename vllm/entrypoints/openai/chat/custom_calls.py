"""Convert calls of custom tools: the JSON arguments that the model writes become the text of the
input.

To the model, a custom tool is a function with the argument `input`. The input is decoded while the
arguments grow. If the arguments have another form, their JSON text is the input.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any

from vllm.entrypoints.openai.protocol.tools import INPUT

_BEGINNING = f'{{"{INPUT}":"'
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r'\\(?:u([0-9a-fA-F]{4})|(["\\/bfnrt]))')
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_LONGEST_ESCAPE = 6


class CustomCalls:
    """Converts deltas of function calls to deltas of custom tool calls, for one output.

    Args:
        names: names of the custom tools; deltas of other calls do not change.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._inputs: dict[int, InputReader] = {}

    def convert(self, deltas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the deltas, with `custom` instead of `function` for custom tools."""
        converted = []
        for delta in deltas:
            index, function = delta["index"], delta.get("function") or {}
            name, arguments = function.get("name"), function.get("arguments") or ""
            if name in self._names:
                self._inputs[index] = InputReader()
                custom = {"name": name, "input": self._inputs[index].feed(arguments)}
                head = {"index": index, "id": delta.get("id"), "type": "custom"}
                converted.append({**head, "custom": custom})
            elif index in self._inputs:
                converted += _growth(index, self._inputs[index].feed(arguments))
            else:
                converted.append(delta)
        return converted

    def finish(self) -> list[dict[str, Any]]:
        """End the output, and return the deltas that were held back."""
        return [d for index, text in self._inputs.items() for d in _growth(index, text.finish())]


def _growth(index: int, text: str) -> list[dict[str, Any]]:
    return [{"index": index, "custom": {"input": text}}] if text else []


class InputReader:
    """Decodes the string in `{"input": "..."}` incrementally. Accepts any text."""

    def __init__(self) -> None:
        self._unread = ""
        self._num_looked_at = 0
        """Characters of `_unread` that are scanned already, because the beginning may have much
        white space."""
        self._seen = ""
        self._state = self._read_beginning

    def feed(self, text: str) -> str:
        """Add text, and return the new part of the input."""
        self._unread += text
        return self._state()

    def finish(self) -> str:
        """End the text, and return the part that was held back, without an incomplete escape
        sequence.
        """
        if self._state == self._read_beginning and self._unread.strip() not in ("", "{", "{}"):
            return self._unread
        return ""

    def _read_beginning(self) -> str:
        """Hold all text back until it is certain whether the string begins."""
        while self._num_looked_at < len(self._unread):
            char = self._unread[self._num_looked_at]
            self._num_looked_at += 1
            if char.isspace():
                continue
            self._seen += char
            if self._seen == _BEGINNING:
                self._unread = self._unread[self._num_looked_at :]
                self._state = self._read_string
                return self._state()
            if not _BEGINNING.startswith(self._seen) and self._seen != "{}":
                self._state = self._read_raw
                return self._state()
        return ""

    def _read_raw(self) -> str:
        text, self._unread = self._unread, ""
        return text

    def _read_string(self) -> str:
        pieces = []
        place, text = 0, self._unread
        while place < len(text):
            if found := _PLAIN.match(text, place):
                pieces.append(found[0])
                place = found.end()
            elif text[place] == '"':
                self._state = self._read_nothing
                place = len(text)
            elif found := _ESCAPE.match(text, place):
                size, piece = self._decode(found, text)
                if not size:
                    break
                pieces.append(piece)
                place += size
            elif len(text) - place < _LONGEST_ESCAPE:
                break  # the escape sequence may be incomplete
            else:
                pieces.append(text[place])  # not a JSON escape sequence, so kept unchanged
                place += 1
        self._unread = text[place:]
        return "".join(pieces)

    def _decode(self, found: "re.Match[str]", text: str) -> tuple[int, str]:
        """Return the length and the text of an escape sequence; length 0 if it may be
        incomplete.
        """
        size = len(found[0])
        if found[1] is None:
            return size, _ESCAPED.get(found[2], found[2])
        code = int(found[1], 16)
        if not 0xD800 <= code <= 0xDFFF:
            return size, chr(code)
        second = _ESCAPE.match(text, found.end())
        if code < 0xDC00 and second is not None and second[1] is not None:
            low = int(second[1], 16)
            if 0xDC00 <= low <= 0xDFFF:
                return 2 * size, chr(0x10000 + ((code - 0xD800) << 10) + low - 0xDC00)
        rest = text[found.end() :]
        may_come = len(rest) < size and (not rest or "\\u".startswith(rest[:2]))
        return (0, "") if code < 0xDC00 and may_come else (size, "\ufffd")

    def _read_nothing(self) -> str:
        self._unread = ""
        return ""
