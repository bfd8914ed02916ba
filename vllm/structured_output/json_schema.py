"""Find out which library can enforce a JSON schema.

The schema is copied; everything in the copy can be enforced by one of the two libraries. All other
keywords are refused by name, or left out if the request does not ask for strictness. The keywords
that each library enforces were found by validating random outputs; tests/structured_output repeats
that. xgrammar is preferred: it is faster, and supports a plain core of JSON schema. llguidance
supports more, and refuses the rest itself.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from vllm.structured_output.regex import RegexError, translate
from vllm.utils.text.json_pointer import follow_reference
from vllm.utils.text.json_words import show_value

Schema = dict[str, Any]

_MAX_DEPTH = 100
_DEFINITIONS = {"$defs", "definitions"}
_ANNOTATIONS = {
    *("$schema", "$id", "id", "$comment", "title", "description", "default", "examples"),
    *("example", "deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType"),
    *("contentSchema", "$vocabulary", "discriminator", "nullable", "xml", "externalDocs"),
}
_MAPS_OF_SCHEMAS = {"properties", "patternProperties", *_DEFINITIONS}
_LISTS_OF_SCHEMAS = {"allOf", "anyOf", "oneOf", "prefixItems"}
_SCHEMAS = {"items", "additionalProperties"}

_NOBODY_ENFORCES = (
    *("not", "if", "contains", "uniqueItems", "propertyNames", "dependentRequired"),
    *("dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems"),
    *("$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor"),
)
_ENFORCED_FORMATS = {
    *("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6"),
    *("uri", "uuid"),
}
_OTHER_FORMATS = {
    *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template"),
    *("json-pointer", "relative-json-pointer", "regex"),
}
"""Standard formats. Other formats (int32, password) are annotations only."""

_NUMBER_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_XGRAMMAR_KEYS = {
    "object": {
        *("properties", "required", "additionalProperties", "minProperties", "maxProperties")
    },
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "integer": _NUMBER_BOUNDS,
    "number": _NUMBER_BOUNDS,
}
"""Keywords by type. anyOf, $ref, enum and const are supported only without other constraints."""

_ANY_TYPE_KEYS = {
    *("anyOf", "allOf", "oneOf", "$ref", "type", "enum", "const"),
    *("minLength", "maxLength", "pattern", "format", "multipleOf", "patternProperties"),
    *(key for keys in _XGRAMMAR_KEYS.values() for key in keys),
}
_EXACT_INTEGERS = 2**53
_COUNTS = (*("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),)
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_MAY_BE_NULL = {"const", "default", "example"}
_DEPEND_ON = {"if": ("then", "else"), "contains": ("minContains", "maxContains")}
"""Keyword -> keywords that have no meaning without it."""
_NOT_ENFORCED = " cannot be enforced"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class SchemaError(ValueError):
    """A schema that cannot be enforced; the message names the keyword and its location."""


class PreparedSchema:
    """A JSON schema prepared for the grammar libraries.

    Args:
        schema: schema of the user; not modified.
        close_objects: "named": objects that name properties may have no others unless the schema
            allows them; "all": this also applies to objects that name none.
        is_strict: refuse what no library can enforce; otherwise leave it out.

    Attributes:
        schema: a copy to compile.
        only_llguidance: why xgrammar cannot enforce it; None: it can.
        left_out: what is not enforced, such as "'uniqueItems' of 'a'".

    Raises:
        SchemaError: no library can enforce it, or it is not a schema.
    """

    def __init__(
        self, schema: object, *, close_objects: str = "named", is_strict: bool = True
    ) -> None:
        self.only_llguidance: str | None = None
        self.left_out: list[str] = []
        self._is_strict = is_strict
        self._may_close = not _combines_objects(schema)
        self._close_all = close_objects == "all"
        if schema is False:
            raise SchemaError("the JSON schema 'false' allows no output")
        schema = {} if schema is True else _with_plain_names(schema)
        self._root = schema
        self._names = _values_of_keys(schema, ("$id", "$anchor", "$dynamicAnchor"))
        prepared = self._node(schema, "the schema", 0)
        assert isinstance(prepared, dict)
        prepared.pop("x-guidance", None)  # options of llguidance, which requests must not set
        self.schema: Schema = prepared

    # ---- one schema -----------------------------------------------------------------------

    def _node(self, node: object, where: str, depth: int) -> Schema | bool:
        if depth > _MAX_DEPTH:
            raise SchemaError(f"the schema is nested more than {_MAX_DEPTH} levels deep")
        if isinstance(node, bool):
            if not node:
                self._leave_xgrammar("false as a schema")
            return node
        if not isinstance(node, Mapping):
            raise SchemaError(f"{where} must be an object, got {show_value(node)}")
        own: Schema = dict(node)
        for rewrite in _REWRITES:
            rewrite(own)
        self._read_types(own, where)
        self._refuse(own, where)
        self._read_strings(own, where)
        self._close(own)
        self._refuse_min_properties(own, where)
        self._check_xgrammar(own)
        for key, value in own.items():
            inside = f"{key!r} of {where}" if depth < 3 else repr(key)
            if key in _MAPS_OF_SCHEMAS:
                _check_type(value, dict, inside)
                own[key] = {k: self._node(v, f"{k!r}", depth + 1) for k, v in value.items()}
            elif key in _LISTS_OF_SCHEMAS:
                _check_type(value, list, inside)
                own[key] = [self._node(v, inside, depth + 1) for v in value]
            elif key in _SCHEMAS and value is not False:
                own[key] = self._node(value, inside, depth + 1)
        return own

    def _leave_xgrammar(self, reason: str) -> None:
        if self.only_llguidance is None:
            self.only_llguidance = reason

    def _leave_out(self, own: Schema, key: str, what: str, problem: str) -> None:
        """Refuse a keyword that no library enforces, or remove it if the schema is not strict."""
        if self._is_strict:
            raise SchemaError(f"{what}{problem}")
        for each in (key, *_DEPEND_ON.get(key, ())):
            own.pop(each, None)
        self.left_out.append(what)

    def _read_types(self, own: Schema, where: str) -> None:
        """Check the keyword type. Some clients write its values in upper case, such as Gemini's."""
        kind = own.get("type")
        kinds = kind if isinstance(kind, list) else [kind]
        lower = [each.lower() for each in kinds if isinstance(each, str)]
        if len(lower) < len(kinds):
            return  # there is no type, or the libraries refuse it
        if unknown := [each for each in lower if each not in _TYPES]:
            problem = f"must be one of {', '.join(_TYPES)}, got {show_value(unknown[0])}"
            self._leave_out(own, "type", f"'type' of {where}", f" {problem}")
        else:
            own["type"] = lower if isinstance(kind, list) else lower[0]

    def _refuse(self, own: Schema, where: str) -> None:
        for key in _NOBODY_ENFORCES:
            if key in own and not (key == "uniqueItems" and own[key] is False):
                if key in ("$anchor", "$dynamicAnchor"):
                    self._leave_xgrammar(repr(key))
                    continue
                self._leave_out(own, key, f"{key!r} of {where}", _NOT_ENFORCED)
        own.pop("uniqueItems", None)
        reference = own.get("$ref")
        if reference is not None and not (isinstance(reference, str) and reference.startswith("#")):
            problem = f"must point into the schema, got {show_value(reference)}"
            self._leave_out(own, "$ref", f"'$ref' of {where}", f" {problem}")
        elif reference is not None and not self._has_part(reference):
            problem = f"points to {show_value(reference)}, which the schema does not have"
            self._leave_out(own, "$ref", f"'$ref' of {where}", f" {problem}")

    def _has_part(self, reference: str) -> bool:
        """Return whether a reference inside the schema points to a part of it."""
        if self._names["$id"]:
            return True  # it is relative to the nearest $id; the libraries check it
        if reference == "#" or reference.startswith("#/"):
            return follow_reference(self._root, reference) is not None
        return reference[1:] in self._names["$anchor"] | self._names["$dynamicAnchor"]

    def _read_strings(self, own: Schema, where: str) -> None:
        """Check the keywords pattern, patternProperties and format."""
        if "format" in own:
            _check_type(own["format"], str, f"'format' of {where}")
            is_text = "string" in (own.get("type", "string") or ())
            if is_text and own["format"] in _OTHER_FORMATS:
                what = f"'format' {show_value(own['format'])} of {where}"
                self._leave_out(own, "format", what, _NOT_ENFORCED)
            elif not is_text or own["format"] not in _ENFORCED_FORMATS:
                del own["format"]
        if "pattern" in own:
            what = f"'pattern' of {where}"
            _check_type(own["pattern"], str, what)
            try:
                own["pattern"] = translate(own["pattern"], search=True).text
            except RegexError as error:
                self._leave_out(own, "pattern", what, f": {error}")
        if isinstance(patterns := own.get("patternProperties"), Mapping):
            own["patternProperties"] = {
                _pattern(pattern, f"'patternProperties' of {where}"): schema
                for pattern, schema in patterns.items()
            }

    def _close(self, own: Schema) -> None:
        if not self._may_close or "additionalProperties" in own or "patternProperties" in own:
            return
        if own.get("type") != "object" or any(k in own for k in ("$ref", "anyOf", "oneOf")):
            return
        names = own.get("properties") or {}
        if not set(_strings(own.get("required"))) <= set(names):
            return
        if self._close_all or names:
            own["additionalProperties"] = False

    def _refuse_min_properties(self, own: Schema, where: str) -> None:
        least = own.get("minProperties")
        if isinstance(least, int) and least > max(1, len(set(_strings(own.get("required"))))):
            is_closed = own.get("additionalProperties") is False and "properties" in own
            if not is_closed or "patternProperties" in own:
                # A name that the model writes twice counts only once, so the number of properties
                # is not enough.
                what = f"'minProperties' of {where}"
                self._leave_out(own, "minProperties", what, _NOT_ENFORCED)

    # ---- xgrammar -------------------------------------------------------------------------

    def _check_xgrammar(self, own: Schema) -> None:
        """Record the reason if xgrammar does not enforce all of a schema."""
        if self.only_llguidance is not None:
            return
        asserted = own.keys() & _ANY_TYPE_KEYS
        for key in ("anyOf", "$ref"):
            if key in asserted and asserted != {key}:
                self._leave_xgrammar(f"{key!r} together with {min(asserted - {key})!r}")
        if "$ref" in own and not _is_plain_pointer(own["$ref"]):
            self._leave_xgrammar(f"'$ref' {own['$ref']!r}")
        if "$id" in own and any(key in own for key in ("$ref", *_DEFINITIONS)):
            self._leave_xgrammar("'$id'")
        kind = own.get("type")
        if values := _values_of(own):
            self._check_values(asserted, kind, values)
            return
        known = _XGRAMMAR_KEYS.get(kind, set()) if isinstance(kind, str) else set()
        if more := asserted - known - {"type", "anyOf", "$ref"}:
            self._leave_xgrammar(repr(min(more)))
        if kind == "integer" and any(not _is_exact(own[k]) for k in _NUMBER_BOUNDS & own.keys()):
            self._leave_xgrammar("a bound that is not an integer of at most 53 bits")
        if not set(_strings(own.get("required"))) <= set(own.get("properties") or {}):
            self._leave_xgrammar("'required' without 'properties'")

    def _check_values(self, asserted: set[str], kind: object, values: list[Any]) -> None:
        """Check enum and const. xgrammar ignores all other keywords next to them."""
        if len(asserted - {"type"}) > 1:
            self._leave_xgrammar("'enum' or 'const' together with another constraint")
        if kind is not None:
            kinds = set(_strings([kind] if isinstance(kind, str) else kind))
            if not all(kinds & _types_of(value) for value in values):
                self._leave_xgrammar("'enum' or 'const' of another type")


# ---- older and equivalent notations --------------------------------------------------------


def _nulls_and_counts(own: Schema) -> None:
    """Leave out keywords that are null, which programs write for what is not set, and convert
    counts such as 1.0, which JSON Schema accepts, to integers.
    """
    for key in [key for key, value in own.items() if value is None and key not in _MAY_BE_NULL]:
        del own[key]
    for key in _COUNTS:
        count = own.get(key)
        if isinstance(count, float) and count.is_integer():
            own[key] = int(count)


def _tuple_items(own: Schema) -> None:
    """Convert the tuples of draft 7 (items is a list, additionalItems the rest) to prefixItems and
    items.
    """
    if isinstance(own.get("items"), list):
        own["prefixItems"] = own.pop("items")
        if "additionalItems" in own:
            own["items"] = own["additionalItems"]
    own.pop("additionalItems", None)


def _boolean_bounds(own: Schema) -> None:
    """Convert the exclusive bounds of draft 4, where exclusiveMinimum is a boolean, to numbers."""
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(is_exclusive := own.get(exclusive), bool):
            del own[exclusive]
            if is_exclusive and bound in own:
                own[exclusive] = own.pop(bound)


def _conditions(own: Schema) -> None:
    """Refuse keywords that have no meaning without others (such as `then` without `if`)."""
    for key, others in _DEPEND_ON.items():
        if key not in own:
            for other in others:
                own.pop(other, None)
    for key in ("unevaluatedProperties", "unevaluatedItems"):
        if own.get(key) is True:
            del own[key]
    combined = any(k in own for k in ("$ref", "allOf", "anyOf", "oneOf"))
    if own.get("unevaluatedProperties") is False and not combined:
        own.setdefault("additionalProperties", False)
        del own["unevaluatedProperties"]


def _property_names(own: Schema) -> None:
    """Convert propertyNames to patternProperties, if the object has no other rules for names."""
    names = own.get("propertyNames")
    if not isinstance(names, Mapping) or own.get("properties") or own.get("patternProperties"):
        return
    asserted = names.keys() - _ANNOTATIONS - {"type"}
    value = own.get("additionalProperties", True)
    if names.get("type", "string") != "string":
        return
    if asserted == {"pattern"} and isinstance(names["pattern"], str):
        own["patternProperties"] = {names["pattern"]: value}
    elif asserted == {"enum"} and _strings(names["enum"]) == names["enum"]:
        own["properties"] = dict.fromkeys(names["enum"], value)
    elif asserted:
        return
    if asserted:
        own["additionalProperties"] = False
    del own["propertyNames"]


_REWRITES: tuple[Callable[[Schema], None], ...] = (
    _nulls_and_counts,
    _tuple_items,
    _boolean_bounds,
    _conditions,
    _property_names,
)


# ---- helpers ------------------------------------------------------------------------


def _with_plain_names(schema: object) -> object:
    """Return a schema whose definitions have names that need no escapes in a reference.

    Programs name definitions after generic types, such as `List[int]` or `Pick<A, "b">`, and the
    libraries cannot read references to them.
    """
    if not isinstance(schema, Mapping):
        return schema
    renamed: dict[str, str] = {}
    copy = dict(schema)
    for place in _DEFINITIONS:
        own = schema.get(place)
        if not isinstance(own, Mapping) or all(map(_PLAIN_NAME.fullmatch, own)):
            continue
        taken = set(own)
        names = {name: _plain_name(name, taken) for name in own}
        copy[place] = {names[name]: own[name] for name in own}
        renamed |= {f"#/{place}/{old}": f"#/{place}/{new}" for old, new in names.items()}
    return _rename_references(copy, renamed, _MAX_DEPTH * 2) if renamed else schema


def _plain_name(name: str, taken: set[str]) -> str:
    if _PLAIN_NAME.fullmatch(name):
        return name
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
    while plain in taken:
        plain += "_"
    taken.add(plain)
    return plain


def _rename_references(schema: Any, renamed: Mapping[str, str], depth: int) -> Any:
    if depth == 0:
        return schema  # refused later, because it is nested too deeply
    if isinstance(schema, list):
        return [_rename_references(each, renamed, depth - 1) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    copy = {key: _rename_references(each, renamed, depth - 1) for key, each in schema.items()}
    if isinstance(reference := copy.get("$ref"), str):
        pointer = unquote(reference)
        readings = (reference, pointer, pointer.replace("~1", "/").replace("~0", "~"))
        found = [renamed[reading] for reading in readings if reading in renamed]
        copy["$ref"] = found[0] if found else reference
    return copy


def _values_of_keys(schema: object, keys: Sequence[str]) -> dict[str, set[str]]:
    """Return the strings that a schema has under some keys, at any depth."""
    found: dict[str, set[str]] = {key: set() for key in keys}
    pending = [schema]
    while pending:
        item = pending.pop()
        if isinstance(item, Mapping):
            for key in keys:
                if isinstance(value := item.get(key), str):
                    found[key].add(value)
            pending += item.values()
        elif isinstance(item, list):
            pending += item
    return found


def _pattern(pattern: str, where: str) -> str:
    try:
        return translate(pattern, search=True).text
    except RegexError as error:
        raise SchemaError(f"{where}: {error}") from None


def _check_type(value: object, kind: type, what: str) -> None:
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}
    if not isinstance(value, kind):
        raise SchemaError(f"{what} must be {names[kind]}, got {show_value(value)}")


def _strings(values: object) -> list[str]:
    return [v for v in values if isinstance(v, str)] if isinstance(values, list) else []


def _values_of(own: Schema) -> list[Any]:
    values = own.get("enum")
    found = list(values) if isinstance(values, list) else []
    return [*found, own["const"]] if "const" in own else found


def _types_of(value: object) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"}
    kinds = ((str, "string"), (list, "array"), (dict, "object"))
    return {next((name for kind, name in kinds if isinstance(value, kind)), "null")}


def _is_exact(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    return value == int(value) and abs(value) < _EXACT_INTEGERS


def _is_plain_pointer(reference: str) -> bool:
    return reference == "#" or (reference.startswith("#/") and not {"~", "%"} & set(reference))


def _combines_objects(schema: object) -> bool:
    """Return whether an object may have to satisfy several schemas, each with its own
    properties.
    """
    pending = [schema]
    while pending:
        item = pending.pop()
        if isinstance(item, Mapping):
            keys = item.keys()
            if "allOf" in keys:
                return True
            if keys & {"$ref", "anyOf", "oneOf"} and keys & _XGRAMMAR_KEYS["object"]:
                return True
            pending += item.values()
        elif isinstance(item, list):
            pending += item
    return False
