r"""Convert the syntax of other regex dialects, so that Python's parser can read it.

JSON schemas contain patterns of JavaScript, and many users know other dialects, of Rust, PCRE or
Java:

    \p{Lu}  \P{N}  \pL  \p{Script=Greek}    a property of Unicode; replaced by a placeholder
    character \u{1F600}  \x{41}                       a character by its number
    \ud83d\ude00                            a character as two surrogates
    (?<name>...)                            a named group
    \z                                      the end of the text

This module does not interpret patterns.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_PROPERTY = re.compile(r"\\[pP](?:\{\s*([A-Za-z][\w &=:-]{0,99}?)\s*\}|([A-Z]))")
_BRACED_NUMBER = re.compile(r"\\[ux]\{([0-9A-Fa-f]{1,8})\}")
_SURROGATES = re.compile(r"\\u([dD][89abAB][0-9A-Fa-f]{2})\\u([dD][c-fC-F][0-9A-Fa-f]{2})")
_SURROGATE = re.compile(r"\\(?:u|U0000)[dD][89a-fA-F][0-9A-Fa-f]{2}|[\ud800-\udfff]")
_FIRST_STAND_IN, _LAST_STAND_IN = 0xD800, 0xDFFF
"""Surrogates, which are not characters, so no pattern can mean them."""


class RegexError(ValueError):
    """A pattern is not valid, or cannot be enforced; the message has the reason."""


@dataclass(frozen=True)
class PythonPattern:
    r"""A pattern that Python's parser can read.

    Attributes:
        text: text of the pattern.
        properties: stand-in -> the class that it replaces, such as `\p{L}`.
        positions: the position in the original of each character of the text.
    """

    text: str
    properties: Mapping[int, str]
    positions: list[int]

    def describe(self, error: re.error) -> str:
        """Return Python's error message, with positions in the original pattern."""
        message = error.msg
        for stand_in, name in self.properties.items():
            message = message.replace(chr(stand_in), name)
        if error.pos is None:
            return f"not a regular expression: {message}"
        place = self.positions[error.pos] if error.pos < len(self.positions) else None
        where = "at the end" if place is None else f"at position {place}"
        if message.startswith("bad escape"):
            return f"the escape {message.removeprefix('bad escape ')} {where} is not supported"
        return f"not a regular expression: {message} {where}"


def to_python(pattern: str) -> PythonPattern:
    """Convert a pattern to the syntax of Python's parser.

    Raises:
        RegexError: an escape is malformed, or is not a character.
    """
    return _Rewriter(pattern).rewrite()


class _Rewriter:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._pieces: list[str] = []
        self._positions: list[int] = []
        self._stand_ins: dict[str, int] = {}
        self._is_in_class = False

    def rewrite(self) -> PythonPattern:
        while self._at < len(self._pattern):
            self._step()
        properties = {stand_in: name for name, stand_in in self._stand_ins.items()}
        return PythonPattern("".join(self._pieces), properties, self._positions)

    def _step(self) -> None:
        pattern, at = self._pattern, self._at
        if pattern[at] == "\\":
            self._escape()
        elif _SURROGATE.match(pattern, at):
            self._refuse_surrogate()
        elif self._is_in_class:
            self._is_in_class = pattern[at] != "]"
            self._write(1)
        elif pattern[at] == "[":
            self._is_in_class = True
            # A "]" right after the opening bracket is a character of the class and does not close
            # it.
            first = at + (2 if pattern.startswith("[^", at) else 1)
            self._write(first - at + pattern.startswith("]", first))
        elif pattern.startswith("(?<", at) and not pattern.startswith(("(?<=", "(?<!"), at):
            self._write(3, "(?P<")
        else:
            self._write(1)

    def _escape(self) -> None:
        pattern, at = self._pattern, self._at
        kind = pattern[at + 1 : at + 2]
        if kind and kind in "pP":
            self._property()
        elif found := _BRACED_NUMBER.match(pattern, at):
            self._write(len(found[0]), self._character(int(found[1], 16)))
        elif found := _SURROGATES.match(pattern, at):
            high, low = int(found[1], 16) - 0xD800, int(found[2], 16) - 0xDC00
            self._write(len(found[0]), self._character(0x10000 + (high << 10) + low))
        elif _SURROGATE.match(pattern, at):
            self._refuse_surrogate()
        elif kind == "z" and not self._is_in_class:
            self._write(2, r"\Z")
        else:
            self._write(2)

    def _property(self) -> None:
        found = _PROPERTY.match(self._pattern, self._at)
        if found is None:
            name = self._pattern[self._at : self._at + 2]
            raise RegexError(
                f"{name} at position {self._at} must be followed by a Unicode property in "
                rf"braces, such as {name}{{L}}, {name}{{Lu}} or {name}{{Script=Greek}}"
            )
        name = f"{found[0][:2]}{{{found[1] or found[2]}}}"
        if name not in self._stand_ins:
            if _FIRST_STAND_IN + len(self._stand_ins) > _LAST_STAND_IN:
                raise RegexError("the pattern has too many different Unicode properties")
            self._stand_ins[name] = _FIRST_STAND_IN + len(self._stand_ins)
        self._write(len(found[0]), chr(self._stand_ins[name]))

    def _character(self, code_point: int) -> str:
        if code_point > 0x10FFFF or 0xD800 <= code_point <= 0xDFFF:
            raise RegexError(
                f"{code_point:X} at position {self._at} is not the code point of a character"
            )
        return f"\\U{code_point:08X}"

    def _refuse_surrogate(self) -> None:
        raise RegexError(f"the surrogate at position {self._at} must be part of a pair")

    def _write(self, size: int, text: str | None = None) -> None:
        """Advance by `size` characters, and write them, or `text` instead."""
        written = self._pattern[self._at : self._at + size] if text is None else text
        self._pieces.append(written)
        for index in range(len(written)):
            self._positions.append(self._at + (index if text is None else 0))
        self._at += size
