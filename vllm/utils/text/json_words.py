"""Write values of a request in messages, in the words of JSON.

A client in any language sees `null`, `an object` or `"text"`, never the names of Python's types.
"""

import json
from typing import Any

_MAX_SHOWN_CHARS = 80
_MAX_SHOWN_INTEGER = 10**_MAX_SHOWN_CHARS


def show_value(value: Any) -> str:
    """Format a value of a request for a message: shortened JSON; only the type for lists and
    objects.

    >>> show_value(None), show_value({"a": 1}), show_value("text")
    ('null', 'an object', '"text"')
    """
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, (list, tuple)):
        return "a list" if value else "an empty list"
    if isinstance(value, str) and len(value) > _MAX_SHOWN_CHARS:
        return json.dumps(value[:_MAX_SHOWN_CHARS], ensure_ascii=False) + "..."
    if isinstance(value, int) and abs(value) >= _MAX_SHOWN_INTEGER:
        return f"an integer of more than {_MAX_SHOWN_CHARS} digits"
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return f"a value of type {type(value).__name__}"
