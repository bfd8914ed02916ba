r"""Translate a Python regular expression to the dialect of the grammar libraries.

`regex_dialects` first converts syntax of JavaScript, Rust and others, so that Python's parser can
read it.

The libraries read patterns like Rust's regex crate, in which some of Python's syntax has another
meaning (nested classes, `\d` of a newer Unicode) or is refused. So Python's own parser reads the
pattern, and it is written again with few elements: characters, classes, groups, alternatives,
repetition.

`re.fullmatch` of the original matches everything that the written pattern matches. The reverse does
not always hold: `\d`, `\w` and `\s` are ASCII, and `$` is only the very end.
"""

import re
import sys
import warnings
from typing import Any, NamedTuple

from vllm.structured_output.regex_dialects import PythonPattern, RegexError, to_python

if sys.version_info >= (3, 11):
    from re import _constants as codes
    from re import _parser as parser
else:
    import sre_constants as codes
    import sre_parse as parser

_MAX_REPEAT = int(codes.MAXREPEAT)

# Expressions that match at most what Python's classes match. So a negated class has to exclude all
# characters of Python's class.
_FEWER = {
    codes.CATEGORY_DIGIT: "0-9",
    codes.CATEGORY_NOT_DIGIT: r"\P{Nd}",
    codes.CATEGORY_WORD: "0-9A-Z_a-z",
    codes.CATEGORY_NOT_WORD: r"[^\p{L}\p{N}\p{M}\p{Nd}_]",
    codes.CATEGORY_SPACE: r"\t\n\x0B\x0C\r ",
    codes.CATEGORY_NOT_SPACE: r"[^\s\x1C-\x1F]",
}
_MORE = {
    codes.CATEGORY_DIGIT: r"\p{Nd}",
    codes.CATEGORY_NOT_DIGIT: "[^0-9]",
    codes.CATEGORY_WORD: r"\p{L}\p{N}\p{M}_",
    codes.CATEGORY_NOT_WORD: "[^0-9A-Z_a-z]",
    codes.CATEGORY_SPACE: r"\s\x1C-\x1F",
    codes.CATEGORY_NOT_SPACE: r"[^\t\n\x0B\x0C\r ]",
}
_REFUSED = {
    codes.ASSERT: "look-ahead and look-behind",
    codes.ASSERT_NOT: "look-ahead and look-behind",
    codes.GROUPREF: "back-references",
    codes.GROUPREF_EXISTS: "conditional groups",
}
_STARTS = {codes.AT_BEGINNING, codes.AT_BEGINNING_STRING}
_ENDS = {codes.AT_END, codes.AT_END_STRING}


class Translation(NamedTuple):
    """A pattern for the grammar libraries."""

    text: str
    only_llguidance: str | None
    """The part of the pattern that xgrammar would misread; None: no part."""


def translate(pattern: str, *, search: bool = False) -> Translation:
    """Translate a pattern.

    Args:
        pattern: pattern in the syntax of Python's `re`.
        search: True: it may match anywhere in the text, as in a JSON schema, and anchors are kept.
            False: it matches the whole text, and anchors at the ends have no effect.

    Raises:
        RegexError: it does not parse, or has a look-around, a back-reference or an assertion inside
            the text (an anchor, a word boundary), which cannot be enforced.
    """
    read = to_python(pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about syntax that later versions will change
            parsed: Any = parser.parse(read.text, 0)
        writer = _Writer(parsed.state.flags, read, keep_anchors=search)
        text = writer.sequence(list(parsed), at_start=True, at_end=True)
    except re.error as error:
        raise RegexError(read.describe(error)) from None
    except OverflowError as error:
        raise RegexError(f"not a regular expression: {error}") from None
    except RecursionError:
        raise RegexError("the regular expression is nested too deeply") from None
    return Translation(text, writer.only_llguidance)


class _Writer:
    def __init__(self, flags: int, read: PythonPattern, *, keep_anchors: bool) -> None:
        self.only_llguidance: str | None = None
        self._flags = flags
        self._properties = read.properties
        self._keep_anchors = keep_anchors
        if flags & re.MULTILINE:
            raise RegexError("the flag m (^ and $ at every line) is not supported")

    def sequence(self, items: list[tuple[Any, Any]], *, at_start: bool, at_end: bool) -> str:
        parts = []
        for index, (code, value) in enumerate(items):
            first = at_start and all(c is codes.AT for c, _ in items[:index])
            last = at_end and all(c is codes.AT for c, _ in items[index + 1 :])
            parts.append(self._item(code, value, at_start=first, at_end=last))
        return "".join(parts)

    def _item(self, code: Any, value: Any, *, at_start: bool, at_end: bool) -> str:
        if code in _REFUSED:
            raise RegexError(f"{_REFUSED[code]} are not supported")
        if code is codes.AT:
            return self._anchor(value, at_start=at_start, at_end=at_end)
        if code in (codes.LITERAL, codes.NOT_LITERAL, codes.IN, codes.ANY):
            return self._class(code, value)
        if code is codes.BRANCH:
            branches = [self.sequence(list(b), at_start=at_start, at_end=at_end) for b in value[1]]
            return f"(?:{'|'.join(branches)})"
        if code is codes.SUBPATTERN:
            return self._group(value, at_start=at_start, at_end=at_end)
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            return self._repeat(*value)
        raise RegexError(f"{str(code).lower().replace('_', ' ')} is not supported")

    def _anchor(self, value: Any, *, at_start: bool, at_end: bool) -> str:
        if value in _STARTS and at_start:
            return "^" if self._keep_anchors else ""
        if value in _ENDS and at_end:
            return "$" if self._keep_anchors else ""
        if value in _STARTS | _ENDS:
            raise RegexError(
                "^ is supported only at the beginning of a pattern, and $ only at its end"
            )
        raise RegexError("word boundaries (\\b and \\B) are not supported")

    def _group(self, value: Any, *, at_start: bool, at_end: bool) -> str:
        _, more_flags, fewer_flags, items = value
        if more_flags & re.MULTILINE:
            raise RegexError("the flag m (^ and $ at every line) is not supported")
        before = self._flags
        self._flags = (before | more_flags) & ~fewer_flags
        inside = self.sequence(list(items), at_start=at_start, at_end=at_end)
        self._flags = before
        return f"(?:{inside})"

    def _repeat(self, least: int, most: int, items: Any) -> str:
        # Not at the start or end: other repetitions of the part may come before and after it.
        inside = self.sequence(list(items), at_start=False, at_end=False)
        least = int(least)
        if int(most) == _MAX_REPEAT:
            times = {0: "*", 1: "+"}.get(least, f"{{{least},}}")
        else:
            times = f"{{{least},{int(most)}}}"
        return f"(?:{inside}){times}"

    # ---- characters -----------------------------------------------------------------------

    def _class(self, code: Any, value: Any) -> str:
        if code is codes.ANY:
            return r"[\s\S]" if self._flags & re.DOTALL else r"[^\n]"
        if code is codes.LITERAL and not self._flags & re.IGNORECASE:
            return self._character(value, may_be_property=True)
        members = [(code, value)] if code is not codes.IN else list(value)
        is_negated = code is codes.NOT_LITERAL or members[0][0] is codes.NEGATE
        members = [m for m in members if m[0] is not codes.NEGATE]
        inside = "".join(self._member(c, v, wider=is_negated) for c, v in members)
        if is_negated:
            negated = f"[^{inside}]"
            if not self._flags & re.IGNORECASE:
                return negated
            self.only_llguidance = "negated character classes with the flag i (ignore case)"
            return f"(?i:{negated})"
        return f"[{inside}]"

    def _member(self, code: Any, value: Any, *, wider: bool) -> str:
        if code is codes.CATEGORY:
            text = (_MORE if wider else _FEWER)[value]
            if "\\p" in text or "\\P" in text or "[" in text:
                self.only_llguidance = r"classes of Unicode characters, such as \S, \D and \W"
            return text
        if code is codes.RANGE:
            return f"{self._character(value[0])}-{self._character(value[1])}"
        text = self._character(value, may_be_property=True)
        if value in self._properties:
            return text
        if self._flags & re.IGNORECASE and not wider:
            cases = {chr(value).lower(), chr(value).upper()} - {chr(value)}
            text += "".join(self._character(ord(c)) for c in sorted(cases) if len(c) == 1)
        return text

    def _character(self, code_point: int, *, may_be_property: bool = False) -> str:
        """Return a character in the written pattern: itself, its number if it has a special
        meaning, or the property for which it stands.
        """
        if (name := self._properties.get(code_point)) is not None:
            if not may_be_property:
                raise RegexError(
                    f"{name} is a class of characters, so it cannot be the end of a range"
                )
            self.only_llguidance = f"the property {name}"
            return name
        character = chr(code_point)
        if character.isascii() and character.isalnum():
            return character
        return f"\\u{code_point:04X}" if code_point < 2**16 else f"\\U{code_point:08X}"
