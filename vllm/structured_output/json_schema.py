"""Find out which library can enforce a JSON schema.

The schema is copied; everything in the copy can be enforced by one of the two libraries, and all
other keywords are refused by name. The keywords that each library enforces were found by validating
random outputs; tests/structured_output repeats that. xgrammar is preferred: it is faster, and
supports a plain core of JSON schema. llguidance supports more, and refuses the rest itself.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from vllm.structured_output.regex import RegexError, translate

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


class SchemaError(ValueError):
    """A schema that cannot be enforced; the message names the keyword and its location."""


class PreparedSchema:
    """A JSON schema prepared for the grammar libraries.

    Args:
        schema: schema of the user; not modified.
        close_objects: "named": objects that name properties may have no others unless the schema
            allows them; "all": this also applies to objects that name none.

    Attributes:
        schema: a copy to compile.
        only_llguidance: why xgrammar cannot enforce it; None: it can.

    Raises:
        SchemaError: no library can enforce it, or it is not a schema.
    """

    def __init__(self, schema: object, *, close_objects: str = "named") -> None:
        self.only_llguidance: str | None = None
        self._may_close = not _combines_objects(schema)
        self._close_all = close_objects == "all"
        if schema is False:
            raise SchemaError("the JSON schema 'false' allows no output")
        prepared = self._node({} if schema is True else schema, "the schema", 0)
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
            raise SchemaError(f"{where} must be an object, got {type(node).__name__}")
        own: Schema = dict(node)
        for rewrite in _REWRITES:
            rewrite(own)
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

    def _refuse(self, own: Schema, where: str) -> None:
        for key in _NOBODY_ENFORCES:
            if key in own and not (key == "uniqueItems" and own[key] is False):
                if key in ("$anchor", "$dynamicAnchor"):
                    self._leave_xgrammar(repr(key))
                    continue
                raise SchemaError(f"{key!r} of {where} cannot be enforced")
        own.pop("uniqueItems", None)
        reference = own.get("$ref")
        if reference is not None and not (isinstance(reference, str) and reference.startswith("#")):
            raise SchemaError(f"'$ref' of {where} must point into the schema, got {reference!r}")

    def _read_strings(self, own: Schema, where: str) -> None:
        """Check the keywords pattern, patternProperties and format."""
        if "format" in own:
            _check_type(own["format"], str, f"'format' of {where}")
            is_text = "string" in (own.get("type", "string") or ())
            if is_text and own["format"] in _OTHER_FORMATS:
                raise SchemaError(f"'format' {own['format']!r} of {where} cannot be enforced")
            if not is_text or own["format"] not in _ENFORCED_FORMATS:
                del own["format"]
        if "pattern" in own:
            _check_type(own["pattern"], str, f"'pattern' of {where}")
            own["pattern"] = _pattern(own["pattern"], f"'pattern' of {where}")
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
                raise SchemaError(f"'minProperties' of {where} cannot be enforced")

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
    if "if" not in own:
        own.pop("then", None)
        own.pop("else", None)
    if "contains" not in own:
        own.pop("minContains", None)
        own.pop("maxContains", None)
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
    _tuple_items,
    _boolean_bounds,
    _conditions,
    _property_names,
)


# ---- helpers ------------------------------------------------------------------------


def _pattern(pattern: str, where: str) -> str:
    try:
        return translate(pattern, search=True).text
    except RegexError as error:
        raise SchemaError(f"{where}: {error}") from None


def _check_type(value: object, kind: type, what: str) -> None:
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}
    if not isinstance(value, kind):
        raise SchemaError(f"{what} must be {names[kind]}, got {type(value).__name__}")


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
