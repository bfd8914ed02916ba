"""Reads JSON with long strings, such as files as base64, without keeping the interpreter for long.

A parser holds the interpreter until its end: for 13 MB that is longer than the event loop may wait.
So long strings are cut out of the text before it is parsed, and put back into the result. Searching
and copying them takes a tenth of the time.
"""

import json
import secrets
from typing import Any, NamedTuple

import numpy as np

MIN_CHARS = 2**16
"""Shorter strings are not cut out of the text."""
_STEP = MIN_CHARS // 2
_PIECE = 2**18
"""Bytes in which escapes are read in one call."""
_ENCODINGS = ("utf-8", "utf-8-sig")


class _Long(NamedTuple):
    """A string that was cut out of the text."""

    text: str
    num_bytes: int
    """Length of the string in the text, where it may have escapes."""


class CutJson:
    """A JSON text without its long strings.

    A string is cut out if all of it is printable ASCII and its only escapes are of slashes, which
    base64 has.

    Args:
        data: the text; need not be valid.

    Attributes:
        rest: the text, with a short string instead of each long one.
    """

    def __init__(self, data: bytes) -> None:
        self.rest = data
        self._long: dict[str, _Long] = {}
        is_long = len(data) >= MIN_CHARS
        if is_long and json.detect_encoding(data[:4]) in _ENCODINGS:
            self._cut(data)

    def parse(self) -> Any:
        """Return the value of the whole text.

        Raises:
            ValueError, RecursionError: like `json.loads`; positions are of the whole text.
        """
        try:
            value = json.loads(self.rest)
        except json.JSONDecodeError as error:
            error.pos += self._num_missing(error.doc[: error.pos])
            raise
        return self._put_back(value) if self._long else value

    def _cut(self, data: bytes) -> None:
        name = secrets.token_hex(16)
        parts: list[bytes] = []
        end = 0
        for first, last in _unbroken(data):
            text = _as_string(data, first, last)
            if text is not None:
                stand_in = f"{name}{len(self._long):08}"
                self._long[stand_in] = _Long(text, last - first)
                parts += data[end:first], stand_in.encode()
                end = last
        if parts:
            self.rest = b"".join((*parts, data[end:]))

    def _num_missing(self, before: str) -> int:
        return sum(
            long.num_bytes - len(stand_in)
            for stand_in, long in self._long.items()
            if stand_in in before
        )

    def _put_back(self, value: Any) -> Any:
        # Not recursive, because the parser accepts more levels than Python has frames left.
        root = [value]
        containers: list[Any] = [root]
        while containers:
            each = containers.pop()
            for key, item in list(each.items() if isinstance(each, dict) else enumerate(each)):
                if isinstance(item, (dict, list)):
                    containers.append(item)
                elif isinstance(item, str) and item in self._long:
                    each[key] = self._long[item].text
            if isinstance(each, dict) and not self._long.keys().isdisjoint(each):
                whole = {self._text(key): item for key, item in each.items()}
                each.clear()
                each.update(whole)
        return root[0]

    def _text(self, key: str) -> str:
        return self._long[key].text if key in self._long else key


def _unbroken(data: bytes) -> list[tuple[int, int]]:
    """Return the ranges without a quotation mark between two of them that are long enough."""
    found = []
    position = _STEP
    while position < len(data):
        # Positions are checked every _STEP bytes. So the quotation mark before a long range is at
        # most _STEP bytes before the first position inside the range.
        first = data.rfind(b'"', position - _STEP, position) + 1
        last = data.find(b'"', position)
        if last < 0:
            break
        if first and last - first >= MIN_CHARS:
            found.append((first, last))
        position = (last // _STEP + 1) * _STEP
    return found


def _as_string(data: bytes, first: int, last: int) -> str | None:
    """Return the text of a range between two quotation marks, if it is a string to be cut out.

    After a mark that ends a string, no valid JSON has a letter, a digit, "+" or "/"; an escaped
    mark is part of a string.
    """
    before, begin = data[first - 2 : first - 1], data[first : first + 1]
    if before == b"\\" or not (begin.isalnum() or begin in (b"+", b"/")):
        return None
    codes = np.frombuffer(data, np.uint8, last - first, first)
    if codes.min() < ord(" ") or codes.max() > ord("~"):
        return None
    text = data[first:last]
    if b"\\" in text:
        pieces = []
        while first < last:
            end = min(first + _PIECE, last)
            end += data[end - 1] == ord("\\")
            pieces.append(data[first:end].replace(b"\\/", b"/"))
            if b"\\" in pieces[-1]:
                return None
            first = end
        text = b"".join(pieces)
    return text.decode("ascii")
