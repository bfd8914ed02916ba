"""Follow references inside a JSON schema, such as `#/$defs/City`."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote


def follow_reference(root: Any, reference: Any) -> Any:
    """Return the part of a schema to which a reference points; None if there is no such part, or if
    the reference is not a JSON pointer inside of the schema.

    >>> follow_reference({"$defs": {"a/b": {"type": "null"}}}, "#/$defs/a~1b")
    {'type': 'null'}
    >>> follow_reference({}, "#/$defs/A") is None
    True
    """
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found: Any = root
    for part in filter(None, reference[1:].split("/")):
        names = (each.replace("~1", "/").replace("~0", "~") for each in (part, unquote(part)))
        if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
            continue
        name = next((n for n in names if isinstance(found, Mapping) and n in found), None)
        if name is None:
            return None
        found = found[name]
    return found
