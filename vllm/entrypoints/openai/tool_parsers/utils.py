"""Provide helper functions for parsers written for vLLM. This package itself does not use them."""

import json


def find_common_prefix(s1: str, s2: str) -> str:
    """Return the longest common beginning of two strings.

    >>> find_common_prefix('{"city": "Os"}', '{"city": "Oslo"}')
    '{"city": "Os'
    """
    length = next(
        (i for i, (a, b) in enumerate(zip(s1, s2, strict=False)) if a != b), min(len(s1), len(s2))
    )
    return s1[:length]


def find_common_suffix(s1: str, s2: str) -> str:
    """Return the longest common end of two strings, up to the last letter or digit.

    >>> find_common_suffix('{"city": "Os"}', '{"city": "Oslo"}')
    '"}'
    """
    shared = find_common_prefix(s1[::-1], s2[::-1])
    length = next((i for i, c in enumerate(shared) if c.isalnum()), len(shared))
    return shared[:length][::-1]


def extract_intermediate_diff(curr: str, old: str) -> str:
    """Return the part of a string that was inserted into an older version of it.

    >>> extract_intermediate_diff('{"city": "Oslo"}', '{"city": "Os"}')
    'lo'
    """
    suffix = find_common_suffix(curr, old)
    old = old[: len(old) - len(suffix)]
    prefix = find_common_prefix(curr, old)
    end = len(curr) - len(suffix) if suffix else len(curr)
    return curr[len(prefix) : max(end, len(prefix))]


def find_all_indices(string: str, substring: str) -> list[int]:
    """Return all indices at which a substring begins, including overlapping ones.

    >>> find_all_indices("banana", "ana")
    [1, 3]
    """
    return [i for i in range(len(string)) if string.startswith(substring, i)]


def is_complete_json(input_str: str) -> bool:
    """Return whether a string is complete JSON."""
    try:
        json.loads(input_str)
    except ValueError:
        return False
    return True


def consume_space(i: int, s: str) -> int:
    """Return the first index from `i` on that is not white space."""
    return len(s) - len(s[i:].lstrip()) if i < len(s) else i
