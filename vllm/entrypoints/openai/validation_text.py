"""Turns pydantic's validation errors of a request into one message for the user.

A message names fields as the user wrote them, never pydantic's names for types. It ends with the
kind of the error, such as greater_than_equal.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.entrypoints.openai.protocol.accepts import show_value
from vllm.entrypoints.openai.protocol.base import TAG_SIGN

NO_BODY = "the request has no body: send a JSON object"

_MAX_FIELDS_NAMED = 4
_MAX_PARTS_NAMED = 6
_MAX_PART_CHARS = 40
_ORIGINS = ("body", "query", "path", "header", "cookie")
"""Where FastAPI has found a value; the first part of its locations."""
_KEY = "[key]"
"""Pydantic's last part of a location when the key of an object is wrong, not its value."""
_TOO_DEEP = "recursion_depth_exceeded"
_OBJECT_KINDS = ("dict_type", "model_type", "model_attributes_type")
_BODY_KINDS = ("missing", *_OBJECT_KINDS)
_WORDS = {
    **dict.fromkeys(_OBJECT_KINDS, "must be an object"),
    "too_short": "has too few entries; it must have {min_length} or more",
    "too_long": "has too many entries; it must have {max_length} or fewer",
    _TOO_DEEP: "is nested too deeply",
}
"""Kind -> our message, where pydantic's own names classes of this program."""
_WITHOUT_VALUE = ("missing", "too_short", "too_long", _TOO_DEEP)
"""Kinds of errors whose message does not show the value."""
_SENTENCES = ("must ", "is ", "has ")
"""Beginnings of messages that continue a sentence whose subject is the field."""


def describe_validation(errors: Sequence[Any]) -> tuple[str, str | None]:
    """What pydantic complains about, as one message, and the first field at fault.

    >>> describe_validation(
    ...     [{"loc": ("body", "n"), "msg": "Input should be less", "type": "less", "input": 9}]
    ... )
    ('n: Input should be less; it is 9 (less)', 'n')
    """
    for error in errors:
        if error["type"] == "json_invalid":  # its location is a position, not a field
            reason = error.get("ctx", {}).get("error", error["msg"])
            return f"the body is not JSON: {reason} at {error['loc'][-1]}", None
        if error["type"] in _BODY_KINDS and not _fields(error["loc"]):
            return _describe_body(error), None
    texts = [_describe(error) for error in errors[:_MAX_FIELDS_NAMED]]
    if len(errors) > _MAX_FIELDS_NAMED:
        texts.append(f"and {len(errors) - _MAX_FIELDS_NAMED} more")
    return "; ".join(texts), _param(errors[0]) if errors else None


def _describe_body(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return f"{NO_BODY} (missing)"
    return f"the body must be a JSON object; it is {show_value(error['input'])} ({error['type']})"


def _describe(error: Mapping[str, Any]) -> str:
    kind, fields, context = error["type"], _fields(error["loc"]), error.get("ctx", {})
    text = error["msg"]
    is_own = "problem" in context or "accepted" in context  # of `field_error` and `accepts`
    if not is_own:
        text = _WORDS[kind].format(**context) if kind in _WORDS else text
        if "input" in error and kind not in _WITHOUT_VALUE:
            text += f"; it is {show_value(error['input'])}"
    if kind == _TOO_DEEP:
        fields = fields[:1]  # deeper places have names of pydantic's
    is_key = bool(fields) and fields[-1] == _KEY
    if is_key:
        fields = fields[:-2]
    name = ".".join(part[:_MAX_PART_CHARS] for part in fields[:_MAX_PARTS_NAMED])
    if name:
        name = f"a key of {name}" if is_key else name
        name += " " if text.startswith(_SENTENCES) else ": "
    return f"{name}{text} ({kind})"


def _param(error: Mapping[str, Any]) -> str | None:
    """The field at fault; a check of several fields names it in its context."""
    fields = _fields(error["loc"])
    field_name = fields[0] if fields else error.get("ctx", {}).get("field")
    return None if field_name is None else str(field_name)


def _fields(location: Sequence[int | str]) -> list[str]:
    """`("body", "stop", 2)` -> ["stop", "2"], without the kinds that one body may have."""
    own = location[1:] if location and location[0] in _ORIGINS else location
    return [str(part) for part in own if not str(part).startswith(TAG_SIGN)]
