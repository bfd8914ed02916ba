"""Shortens what is too long for a log line, in its middle."""

from collections.abc import Sequence

MAX_LINE = 2000
"""Characters of one log line, its prefix included."""

_MAX_LIST = 1500
"""Characters of a list in a log line, which leaves room for the rest of the line."""


def cut_list(values: Sequence[object], max_length: int = _MAX_LIST) -> str:
    """Return the text of a list; of a long one the first and last values, and how many are missing.

    >>> cut_list([1, 2, 3])
    '[1, 2, 3]'
    >>> cut_list(list(range(100)), max_length=40)
    '[0, 1, 2, ... 95 more ..., 98, 99]'
    """
    if len(text := str(list(values))) <= max_length:
        return text
    room = (max_length - len(f"[, ... {len(values)} more ..., ]")) // 2
    first, last = _within(values, room), _within(values[::-1], room)[::-1]
    missing = len(values) - len(first) - len(last)
    return f"[{', '.join([*first, f'... {missing} more ...', *last])}]"


def cut_line(line: str, max_length: int = MAX_LINE) -> str:
    """Return the line; of a long one its beginning and end, and how many characters are missing.

    >>> cut_line("a" * 50 + "b" * 50, max_length=60)
    'aaaaaaaaaaaaa[... 73 characters left out ...]bbbbbbbbbbbbbb'
    """
    if len(line) <= max_length:
        return line
    room = max_length - len(f"[... {len(line)} characters left out ...]")
    first, last = line[: room // 2], line[len(line) - (room + 1) // 2 :]
    return f"{first}[... {len(line) - len(first) - len(last)} characters left out ...]{last}"


def _within(values: Sequence[object], room: int) -> list[str]:
    texts: list[str] = []
    for value in values:
        text = str(value)
        room -= len(text) + len(", ")
        if room < 0:
            break
        texts.append(text)
    return texts
