"""Convert arguments that a model wrote as plain text to the types of the tool's JSON schema.

A format without types contains, for example, `<parameter=zip>01234</parameter>`: only the schema of
the tool says whether this is a string. The whole schema is evaluated: references, combinations,
lists of types, enums and constants.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

from vllm.entrypoints.openai.tool_parsers.json_reader import encode_string
from vllm.entrypoints.openai.tool_parsers.python_literals import arguments_to_json
from vllm.utils.text.json_pointer import follow_reference

_MAX_DEPTH = 32
"""A schema that is nested deeper counts as one that allows everything."""

_ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_INTEGRAL = frozenset({"integer", "number"})


@dataclass(frozen=True)
class _Allowed:
    """The values that a schema allows, as far as they decide how a text is converted."""

    types: frozenset[str] = _ALL_TYPES
    """Names of the accepted JSON types. "number" implies "integer"."""
    values: tuple[Any, ...] | None = None
    """The values of an enum or a constant; None: there is neither."""

    @property
    def is_text(self) -> bool:
        """Whether every string is allowed, and nothing else."""
        return self.types <= {"string"} and not self.values

    def __or__(self, other: "_Allowed") -> "_Allowed":
        """Return the union: values that either of the two allows."""
        is_listed = self.values is not None and other.values is not None
        values = (*(self.values or ()), *(other.values or ())) if is_listed else None
        return _Allowed(self.types | other.types, values)

    def __and__(self, other: "_Allowed") -> "_Allowed":
        """Return the intersection: values that both allow."""
        types = self.types & other.types
        if self.values is None or other.values is None:
            return _Allowed(types, other.values if self.values is None else self.values)
        return _Allowed(types, tuple(value for value in self.values if value in other.values))


_ANYTHING = _Allowed()
_STRING = _Allowed(frozenset({"string"}))


def argument_to_json(text: str, key: str, parameters: Mapping[str, Any] | None) -> str:
    """Return the JSON text of an argument that was written as plain text.

    A text that fits none of the allowed types remains JSON if it is JSON, and otherwise becomes a
    string. So nothing that the model wrote is lost.

    Args:
        text: text of the argument.
        key: name of the argument.
        parameters: JSON schema of the tool's arguments. None: there is no such tool, so a text that
            is JSON remains JSON.
    """
    allowed = _allowed(key, parameters)
    if allowed.is_text:
        return encode_string(text)
    found = _read(text)
    for value in allowed.values or ():
        if _types_of(value) & allowed.types and _means(text, found, value):
            return _dump(value)
    if found is not None:
        if found.types & allowed.types:
            is_integer = found.types == _INTEGRAL and "number" not in allowed.types
            return _as_integer(found.text) if is_integer else found.text
        if "string" not in allowed.types and _is_json(text):
            return text.strip()
    return encode_string(text)


def is_text(key: str, parameters: Mapping[str, Any] | None) -> bool:
    """Return whether any text of an argument is its value, so that it can be returned in pieces.

    `key` and `parameters` are the same as for `argument_to_json`.
    """
    return _allowed(key, parameters).is_text


def _allowed(key: str, parameters: Mapping[str, Any] | None) -> _Allowed:
    return _ANYTHING if parameters is None else _Schema(parameters).allowed_for(key)


class _Schema:
    """Evaluates the schema of all arguments of a tool.

    Each schema within it is read at most once, so that references cannot multiply the work.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[int, _Allowed] = {}
        self._searched: set[int] = set()
        self._names_any = False

    def allowed_for(self, key: str) -> _Allowed:
        """Return the values that are allowed for an argument.

        An argument that the schema does not name must be a string, unless the schema names no
        arguments at all.
        """
        found = [self._allowed(each, 0) for each in self._find(key, self._root, 0)]
        return reduce(or_, found) if found else _STRING if self._names_any else _ANYTHING

    def _find(self, key: str, schema: Any, depth: int) -> Iterator[Any]:
        """Yield the schemas of a property, following references and combinations."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or id(schema) in self._searched:
            return
        self._searched.add(id(schema))
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and properties:
            self._names_any = True
            if key in properties:
                yield properties[key]
                return
        if "$ref" in schema:
            yield from self._find(key, follow_reference(self._root, schema["$ref"]), depth + 1)
        for word in ("allOf", "anyOf", "oneOf"):
            for each in _list(schema.get(word)):
                yield from self._find(key, each, depth + 1)
        if isinstance(schema.get("additionalProperties"), Mapping):
            yield schema["additionalProperties"]

    def _allowed(self, schema: Any, depth: int) -> _Allowed:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return _ANYTHING
        if id(schema) not in self._known:
            self._known[id(schema)] = _ANYTHING  # set first, so that a schema may refer to itself
            self._known[id(schema)] = self._combine(schema, depth)
        return self._known[id(schema)]

    def _combine(self, schema: Mapping[str, Any], depth: int) -> _Allowed:
        allowed = _ANYTHING
        types = {each for each in _list(schema.get("type")) if each in _ALL_TYPES}
        if types:
            allowed = _Allowed(frozenset(types | ({"integer"} if "number" in types else set())))
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            kinds = frozenset(kind for value in values for kind in _types_of(value))
            allowed &= _Allowed(kinds, tuple(values))
        if "$ref" in schema:
            allowed &= self._allowed(follow_reference(self._root, schema["$ref"]), depth + 1)
        for each in _list(schema.get("allOf")):
            allowed &= self._allowed(each, depth + 1)
        for word in ("anyOf", "oneOf"):
            choices = [self._allowed(each, depth + 1) for each in _list(schema.get(word))]
            if choices:
                allowed &= reduce(or_, choices)
        if schema.get("nullable") is True:
            allowed = _Allowed(allowed.types | {"null"}, allowed.values)
        return allowed


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _types_of(value: Any) -> frozenset[str]:
    """Return the JSON schema types of a value."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return _INTEGRAL
    if isinstance(value, float):
        return _INTEGRAL if value.is_integer() else frozenset({"number"})
    kinds = {str: "string", list: "array", dict: "object", type(None): "null"}
    return frozenset({kinds[type(value)]})


def _means(text: str, found: "_Literal | None", value: Any) -> bool:
    """Return whether a text represents one value of an enum. `found` is the text, parsed as a
    literal.
    """
    if isinstance(value, str):
        return text.strip() == value.strip()
    if found is None or not found.types & _types_of(value):
        return False
    return bool(found.value == value)


class _Literal(NamedTuple):
    """A text that was parsed as JSON or as a Python literal."""

    types: frozenset[str]
    text: str
    """The JSON text of the value."""
    value: Any


def _read(text: str) -> _Literal | None:
    """Parse a text as JSON or as a Python literal. None: it is neither, so it is a string."""
    literal = text.strip()
    if not _is_json(literal):
        argument = arguments_to_json(f"x={literal}") if literal else None
        if argument is None or not argument.startswith('{"x": '):
            return None
        literal = argument.removeprefix('{"x": ').removesuffix("}")
        if literal.startswith('"') or not _is_json(literal):
            return None  # text in Python quotes is returned as text
    value = json.loads(literal)
    return _Literal(_types_of(value), literal, value)


def _is_json(text: str) -> bool:
    try:
        value = json.loads(text, parse_constant=_refuse)
        text.encode()
    except (ValueError, RecursionError):
        return False
    return not isinstance(value, float) or math.isfinite(value)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _as_integer(literal: str) -> str:
    """Return the JSON text of an integer, which may be written like a float."""
    return literal if literal.lstrip("-").isdigit() else str(int(float(literal)))


def _dump(value: Any) -> str:
    return encode_string(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
