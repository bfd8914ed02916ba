"""Helpers that parsers written for vLLM import. Nothing here uses them."""

import json


def find_common_prefix(s1: str, s2: str) -> str:
    """Return the longest text that both begin with.

    >>> find_common_prefix('{"city": "Os"}', '{"city": "Oslo"}')
    '{"city": "Os'
    """
    length = next(
        (i for i, (a, b) in enumerate(zip(s1, s2, strict=False)) if a != b), min(len(s1), len(s2))
    )
    return s1[:length]


def find_common_suffix(s1: str, s2: str) -> str:
    """Return the longest text without letters and digits that both end with.

    >>> find_common_suffix('{"city": "Os"}', '{"city": "Oslo"}')
    '"}'
    """
    shared = find_common_prefix(s1[::-1], s2[::-1])
    length = next((i for i, c in enumerate(shared) if c.isalnum()), len(shared))
    return shared[:length][::-1]


def extract_intermediate_diff(curr: str, old: str) -> str:
    """Return the part of a text that an older one with the same beginning and end does not have.

    >>> extract_intermediate_diff('{"city": "Oslo"}', '{"city": "Os"}')
    'lo'
    """
    suffix = find_common_suffix(curr, old)
    old = old[: len(old) - len(suffix)]
    prefix = find_common_prefix(curr, old)
    end = len(curr) - len(suffix) if suffix else len(curr)
    return curr[len(prefix) : max(end, len(prefix))]


def find_all_indices(string: str, substring: str) -> list[int]:
    """Return the positions at which a text begins in another one, including overlapping ones.

    >>> find_all_indices("banana", "ana")
    [1, 3]
    """
    return [i for i in range(len(string)) if string.startswith(substring, i)]


def is_complete_json(input_str: str) -> bool:
    """Whether it is JSON, with nothing missing."""
    try:
        json.loads(input_str)
    except ValueError:
        return False
    return True


def consume_space(i: int, s: str) -> int:
    """Return the first position from `i` on that is not white space."""
    return len(s) - len(s[i:].lstrip()) if i < len(s) else i
