"""Read a growing text, for parsers that are written as if the text were complete.

A parser is a generator that reads from a `TextStream`. It waits if it has read everything and more
text may come: use `yield from` with any method that returns a `Wait`. The owner of the stream calls
`add`, then resumes the generator. The result does not depend on how the text was split into pieces,
as long as the parser decides only by text that it has read, not by text that happens to be
available.

Every character is read a bounded number of times, so the work is linear in the length of the text.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]
"""A generator that waits for text if necessary; `yield from` gives its result."""

_SPACE = re.compile(r"\s+")
_MIN_CUT_CHARS = 3
"""Shortest beginning of a marker that is dropped at the end of a cut text: a shorter one, such as
"<", is as likely to be text."""


class Markers:
    """Fixed strings to search for in a text. No marker may contain another one.

    Args:
        texts: the markers, none of them empty. With no markers, nothing is ever found.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._first_letter = re.compile("|".join({re.escape(text[0]) for text in texts}) or r"(?!)")
        self._longest = max(map(len, texts), default=1)

    def search(self, text: str, start: int) -> "re.Match[str] | None":
        """Return the match of the first marker at or after `start`; None if there is none."""
        return self._pattern.search(text, start)

    def safe_end(self, text: str, start: int) -> int:
        """Return the index up to which a text cannot be part of a marker, even if more text is
        added.

        This is the index at which a marker may begin at the end of the text, else the length of the
        text. Call it only if `search` found nothing.
        """
        start = max(start, len(text) - self._longest + 1)
        while found := self._first_letter.search(text, start):
            end = text[found.start() :]
            if any(marker.startswith(end) for marker in self._texts):
                return found.start()
            start = found.end()
        return len(text)


class TextStream:
    """A text that grows at its end and is read from its beginning.

    Attributes:
        text: holds the unread text, from `position` on.
        position: index of the next character to read.
        is_complete: no more text will be added.
        is_cut: the text is complete only because of a limit, so more would have followed.
        num_read: number of characters that were read since the beginning of the text.
    """

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.num_read = 0
        self.is_complete = False
        self.is_cut = False
        self._taken: list[str] = []

    def add(self, text: str) -> None:
        """Append text."""
        # At most a part of a marker is unread, so little is copied.
        self.text = self.text[self.position :] + text
        self.position = 0

    def consume(self, num_characters: int) -> str:
        """Read and return this many characters, which must be available."""
        piece = self.text[self.position : self.position + num_characters]
        self.position += num_characters
        self.num_read += len(piece)
        self._taken.append(piece)
        return piece

    def pop_read(self) -> str:
        """Return the text that was read since the last call of this method."""
        taken, self._taken = self._taken, []
        return "".join(taken)

    def more(self) -> Wait[bool]:
        """Wait until there is unread text. Returns False if the text has ended."""
        while self.position >= len(self.text):
            if self.is_complete:
                return False
            yield
        return True

    def grow(self) -> Wait[bool]:
        """Wait until more text is added. Returns False if the text has ended."""
        size = len(self.text) - self.position
        while len(self.text) - self.position == size:
            if self.is_complete:
                return False
            yield
        return True

    def peek(self) -> Wait[str]:
        """Return the next character without reading it; an empty string if the text has ended."""
        return self.text[self.position] if (yield from self.more()) else ""

    def skip_space(self) -> Wait[str]:
        """Skip white space, and return the character after it without reading it; an empty string
        if the text has ended.
        """
        yield from self.read_run(_SPACE)
        return (yield from self.peek())

    def read_run(self, pattern: "re.Pattern[str]") -> Wait[str]:
        """Read as many characters as match the pattern.

        Args:
            pattern: one or more characters of a set, such as `[a-z]+`.
        """
        pieces = []
        while (yield from self.more()):
            match = pattern.match(self.text, self.position)
            if match is None:
                break
            pieces.append(self.consume(match.end() - self.position))
        return "".join(pieces)

    def read_literal(self, literal: str) -> Wait[bool]:
        """Read exactly this text, or nothing. Returns whether the text was found."""
        while not self.text.startswith(literal, self.position):
            num_unread = len(self.text) - self.position
            if num_unread >= len(literal) or not literal.startswith(self.text[self.position :]):
                return False
            if not (yield from self.grow()):
                return False
        self.consume(len(literal))
        return True

    def drop_cut(self, markers: Markers) -> None:
        """Drop the beginning of a marker at the end of a cut text, because half a marker is neither
        text nor the sign that it would have become. Call it only if no whole marker is left.
        """
        if self.is_complete and self.is_cut:
            start = markers.safe_end(self.text, self.position)
            if len(self.text) - start >= _MIN_CUT_CHARS:
                self.text = self.text[:start]

    def read_until(self, markers: Markers, sink: Callable[[str], None]) -> Wait[str]:
        """Read the text before the first marker.

        Args:
            markers: the markers at which to stop.
            sink: receives the text in pieces, as soon as they cannot be part of a marker.

        Returns:
            The marker, which is not read; an empty string if the text has ended without one.
        """
        while True:
            found = markers.search(self.text, self.position)
            if found:
                end = found.start()
            elif self.is_complete:
                self.drop_cut(markers)
                end = len(self.text)
            else:
                end = markers.safe_end(self.text, self.position)
            if end > self.position:
                sink(self.consume(end - self.position))
            if found:
                return found.group()
            if self.is_complete:
                return ""
            yield
