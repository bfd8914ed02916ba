"""Find stop strings in a growing text. Independent of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that was found in a text."""

    string: str
    start: int
    """Index of the first character of the string."""

    @property
    def end(self) -> int:
        """Index after the last character of the stop string."""
        return self.start + len(self.string)


class StopStrings:
    """The stop strings of one request.

    Args:
        strings: the strings, at least one, none of them empty.
        is_shown: the stop string remains in the text, so no text is held back.
    """

    __slots__ = ("_strings", "is_shown")

    def __init__(self, strings: Sequence[str], *, is_shown: bool = False) -> None:
        self._strings = tuple(strings)
        self.is_shown = is_shown

    def find(self, text: str, num_new: int) -> StopMatch | None:
        """Find the stop string that is completed first in the new characters.

        If several are completed at the same character, the one that starts first is returned. A
        search character by character finds the same, so the result does not depend on how tokens
        split the text.

        Args:
            text: the output so far.
            num_new: number of characters at its end that were not searched before.
        """
        first: StopMatch | None = None
        for string in self._strings:
            start = text.find(string, max(0, len(text) - num_new - len(string) + 1))
            if start < 0:
                continue
            match = StopMatch(string, start)
            if first is None or (match.end, start) < (first.end, first.start):
                first = match
        return first

    def num_held(self, text: str) -> int:
        """Return the number of characters at the end of a text that may be the beginning of a stop
        string.

        >>> StopStrings(["</end>"]).num_held("value</e")
        3
        >>> StopStrings(["</end>"]).num_held("value</b")
        0
        """
        if self.is_shown:
            return 0
        held = 0
        for string in self._strings:
            start = text.find(string[0], max(0, len(text) - len(string) + 1))
            while start >= 0 and len(text) - start > held:
                if string.startswith(text[start:]):
                    held = len(text) - start
                    break
                start = text.find(string[0], start + 1)
        return held
