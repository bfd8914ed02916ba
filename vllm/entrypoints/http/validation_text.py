"""Convert pydantic's validation errors of a request to one message for the user.

A message names fields as the user wrote them and says what they must be: `top_k must be an integer,
got "a"`. It contains no words of pydantic: neither its names for types nor its error codes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.utils.text.json_words import show_value

NO_BODY = "the request has no body: send a JSON object"
TAG_SIGN = ":"
"""Prefix for names of body types in error locations, because they are not fields."""

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
_INTEGER_KINDS = ("int_type", "int_parsing", "int_parsing_size", "int_from_float")
_STRING_KINDS = ("string_type", "string_unicode")
_LIST_KINDS = ("list_type", "tuple_type", "set_type", "frozen_set_type", "iterable_type")
_RULES = {
    **dict.fromkeys(_OBJECT_KINDS, "must be an object"),
    **dict.fromkeys(_LIST_KINDS, "must be a list"),
    **dict.fromkeys(_STRING_KINDS, "must be a string"),
    **dict.fromkeys(_INTEGER_KINDS, "must be an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("literal_error", "enum"), "must be {expected}"),
    "union_tag_invalid": "must be of a type among {expected_tags}",
    "none_required": "must be null",
    "finite_number": "must be a finite number",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "string_too_short": "must have {min_length} or more characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "too_short": "has too few entries; it must have {min_length} or more",
    "too_long": "has too many entries; it must have {max_length} or fewer",
    "missing": "is required",
    "extra_forbidden": "is not a known field",
    _TOO_DEEP: "is nested too deeply",
}
"""Code of an error of pydantic -> the rule that a value has broken."""
_NO_RULE = "is not a valid value"
"""Rule for all other codes. No field of the server's requests can have one (tested)."""
_WITHOUT_VALUE = ("missing", "extra_forbidden", "too_short", "too_long", _TOO_DEEP)
"""Codes of errors whose message does not show the value."""
_RAISED = ("value_error", "assertion_error")
"""Codes of exceptions that a validator has raised; their text is the message."""
_MEANT = {
    "messages": ("prompt", "input"),
    "prompt": ("messages", "input", "text", "inputs", "content"),
    "input": ("messages", "prompt", "inputs", "texts", "text", "content", "documents"),
    "documents": ("texts", "passages", "docs", "input"),
    "query": ("queries", "text", "input"),
    "text_1": ("text1", "query"),
    "text_2": ("text2", "documents"),
    "tokens": ("token_ids", "ids", "prompt"),
}
"""Required field of a route -> fields that clients of other APIs or routes send instead."""
_ROUTES = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/responses or /v1/embeddings",
}
_SENTENCES = ("must ", "is ", "has ", "needs ", "contains ")
"""Beginnings of messages that continue a sentence whose subject is the field."""


def describe_validation(errors: Sequence[Any]) -> tuple[str, str | None]:
    """Return one message about the errors of a request, and the first wrong field.

    >>> describe_validation([{"loc": ("body", "n"), "type": "int_parsing", "input": "a"}])
    ('n must be an integer, got "a"', 'n')
    """
    for error in errors:
        if error["type"] == "json_invalid":  # its location is a character position, not a field
            reason = error.get("ctx", {}).get("error", error["msg"])
            return f"the body is not JSON: {reason} at {error['loc'][-1]}", None
        if error["type"] in _BODY_KINDS and not _fields(error["loc"]):
            return _describe_body(error), None
    texts = [_describe(error) for error in errors[:_MAX_FIELDS_NAMED]]
    if len(errors) > _MAX_FIELDS_NAMED:
        texts.append(f"and {len(errors) - _MAX_FIELDS_NAMED} more")
    return "; ".join(texts), _param(errors[0]) if errors else None


def describe_missing(name: str, body: Any) -> str:
    """Return what is wrong with a body without a required field, as the end of a sentence that
    begins with the field. Names the field that the client has sent instead.

    >>> describe_missing("input", {"inputs": "a"})
    'is required; the body has inputs instead: rename it to input'
    """
    given = body if isinstance(body, Mapping) else {}
    other = next((each for each in _MEANT.get(name, ()) if given.get(each) is not None), None)
    if other is None:
        return "is required"
    text = f"is required; the body has {other} instead: rename it to {name}"
    if other in _ROUTES:
        text += f", or send the body to {_ROUTES[other]}"
    return text


def _describe_body(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return NO_BODY
    return f"the body must be a JSON object, got {show_value(error['input'])}"


def _describe(error: Mapping[str, Any]) -> str:
    fields, text = _fields(error["loc"]), _problem(error)
    if error["type"] == _TOO_DEEP:
        fields = fields[:1]  # deeper locations contain type names of pydantic
    is_key = bool(fields) and fields[-1] == _KEY
    if is_key:
        fields = fields[:-2]
    parts = [part[:_MAX_PART_CHARS] for part in fields[:_MAX_PARTS_NAMED]]
    # The name comes from `field_error` and not from the client.
    own_name = error.get("ctx", {}).get("field")
    if own_name is not None:
        parts.append(own_name)
    name = ".".join(parts)
    if not name:
        return text
    name = f"a key of {name}" if is_key else name
    return f"{name} {text}" if text.startswith(_SENTENCES) else f"{name}: {text}"


def _problem(error: Mapping[str, Any]) -> str:
    """Describe the error in a value, as the end of a sentence that begins with its field."""
    code, context = error["type"], error.get("ctx", {})
    if "problem" in context:  # the error was made by `field_error`
        return str(context["problem"])
    if "accepted" in context:  # the error was made by `accepts`
        return str(error["msg"])
    if code in _RAISED and "error" in context:
        return str(context["error"])
    if code == "missing" and len(fields := _fields(error["loc"])) == 1:
        return describe_missing(fields[0], error.get("input"))
    text = _RULES.get(code, _NO_RULE).format(**context)
    if code in _WITHOUT_VALUE or "input" not in error:
        return text
    return f"{text}, got {show_value(error['input'])}"


def _param(error: Mapping[str, Any]) -> str | None:
    """Return the wrong field of the request. A check of several fields names it in its context."""
    fields, context = _fields(error["loc"]), error.get("ctx", {})
    raised = getattr(context.get("error"), "param", None)
    field_name = fields[0] if fields else context.get("field", raised)
    return None if field_name is None else str(field_name)


def _fields(location: Sequence[int | str]) -> list[str]:
    """Convert `("body", "stop", 2)` to ["stop", "2"], without the tags of body types."""
    own = location[1:] if location and location[0] in _ORIGINS else location
    return [str(part) for part in own if not str(part).startswith(TAG_SIGN)]
