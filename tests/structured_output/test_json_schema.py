"""Test which library enforces which schema: random outputs are validated, and unsupported keywords
are refused by name.
"""

import json
import random
from typing import Any

import jsonschema
import pytest

from tests.exhaustive import seeds
from tests.structured_output.helpers import compiled, open_matcher, walk
from tests.structured_output.schemas import random_schema
from vllm.structured_output.json_schema import PreparedSchema, SchemaError

X, L = "xgrammar", "llguidance"

INTEGER: dict[str, Any] = {"type": "integer"}
LIST = {"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}}

ENFORCED: list[tuple[str, Any]] = [
    (X, True),
    (X, {}),
    (X, {"type": "string"}),
    (X, {"type": "number"}),
    (X, {"type": ["null", "boolean"]}),
    (X, {"type": "integer", "minimum": 5, "maximum": 17}),
    (X, {"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 3}),
    (X, {"type": "number", "minimum": 0.5, "maximum": 2.25}),
    (X, {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 3}),
    (X, {"type": "array", "prefixItems": [INTEGER, {"type": "string"}], "items": False}),
    (X, {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["b"]}),
    (X, {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": INTEGER}),
    (X, {"type": "object", "additionalProperties": {"type": "boolean"}}),
    (X, {"type": "object", "additionalProperties": False}),
    (X, {"type": "object", "properties": {"a": INTEGER, "b": {}, "c": {}}, "minProperties": 2}),
    (X, {"anyOf": [INTEGER, {"type": "boolean"}]}),
    (X, {"enum": [1, "a", None, True, {"b": 1.5}]}),
    (X, {"const": 'a"b\u00e9\n'}),
    (X, {**LIST, "$ref": "#/$defs/n"}),
    (X, {"type": "integer", "title": "x", "description": "d", "x-mine": {"not": 1}, "format": "y"}),
    (X, {"type": "string", "format": "password"}),
    (X, {"type": "array", "items": INTEGER, "uniqueItems": False}),
    (X, {"type": "object", "properties": {"not": INTEGER, "pattern": INTEGER}}),
    (L, {"type": "string", "minLength": 2, "maxLength": 4}),
    (L, {"type": "string", "pattern": "^a+b?$"}),
    (L, {"type": "string", "pattern": "^[a-c]", "minLength": 4}),
    (L, {"type": "string", "pattern": r"^\d\w\s.$"}),
    (L, {"type": "integer", "multipleOf": 7}),
    (L, {"type": "number", "multipleOf": 0.5}),
    (L, {"type": "integer", "minimum": 1.5, "maximum": 3.5}),
    (L, {"minimum": 5}),
    (L, {"minItems": 2}),
    (L, {"type": ["integer", "string"], "minLength": 2, "minimum": 3}),
    (L, {"type": "object", "properties": {"a": INTEGER}, "required": ["a", "b"]}),
    (L, {"type": "object", "patternProperties": {"^a": INTEGER}, "additionalProperties": False}),
    (L, {"type": "object", "properties": {"ab": {}}, "patternProperties": {"^a": INTEGER}}),
    (L, {"type": "object", "propertyNames": {"pattern": "^a+$"}}),
    (X, {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER}),
    (L, {"oneOf": [INTEGER, {"type": "string"}]}),
    (L, {"allOf": [INTEGER, {"minimum": 3}]}),
    (L, {"type": "integer", "anyOf": [{"minimum": 3}, {"maximum": -3}]}),
    (L, {"type": "string", "enum": ["a", 1]}),
    (L, {"$ref": "#/$defs/x", "$defs": {"x": INTEGER}, "minimum": 4}),
    (X, {"$ref": "#/definitions/a~1b", "definitions": {"a/b": INTEGER}}),
    (X, {"$ref": "#/$defs/A[int]", "$defs": {"A[int]": INTEGER, "A_int_": {"type": "null"}}}),
    (X, {"$ref": "#/$defs/Pick%3CA%2C%22b%22%3E", "$defs": {'Pick<A,"b">': INTEGER}}),
    (L, {"$ref": "#q", "$defs": {"x": {"$anchor": "q", **INTEGER}}}),
    (L, {"type": "object", "properties": {"a": False}}),
    *(
        (L, {"type": "string", "format": name})
        for name in ("date-time", "time", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
    ),
    (
        L,
        {
            "allOf": [
                {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
                {"type": "object", "properties": {"b": INTEGER}, "required": ["b"]},
            ]
        },
    ),
]


def validate(schema: Any, output: str, draft: type = jsonschema.Draft202012Validator) -> None:
    draft(schema, format_checker=draft.FORMAT_CHECKER).validate(json.loads(output))


@pytest.mark.parametrize(("backend", "schema"), ENFORCED, ids=lambda value: str(value)[:60])
def test_every_output_validates(backend, schema):
    grammar, rng = compiled("json", schema), random.Random(1)
    assert grammar.backend == backend
    outputs = [walk(open_matcher(grammar), rng) for _ in range(60)]
    ended = [output for output in outputs if output is not None]
    assert len(ended) > 20
    for output in ended:
        validate(schema, output)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(40, 100))
def test_every_output_of_a_random_schema_validates(seed):
    rng = random.Random(seed)
    schema = random_schema(rng)
    grammar = compiled("json", schema)
    ended = [output for _ in range(8) if (output := walk(open_matcher(grammar), rng, 600))]
    for output in ended:
        validate(schema, output)


@pytest.mark.parametrize(
    ("schema", "draft"),
    [
        ({"type": "array", "items": [INTEGER], "additionalItems": False}, "Draft7Validator"),
        ({"type": "array", "items": [INTEGER], "additionalItems": {}}, "Draft7Validator"),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, "Draft4Validator"),
        ({"type": "integer", "maximum": 3, "exclusiveMaximum": False}, "Draft4Validator"),
    ],
    ids=str,
)
def test_older_drafts_are_understood(schema, draft):
    grammar, rng = compiled("json", schema), random.Random(1)
    for output in filter(None, (walk(open_matcher(grammar), rng) for _ in range(40))):
        validate(schema, output, getattr(jsonschema, draft))


@pytest.mark.parametrize(
    ("schema", "meaning"),
    [
        ({"type": "INTEGER", "minimum": 3}, {"type": "integer", "minimum": 3}),
        ({**INTEGER, "maximum": None, "format": None, "enum": None, "$ref": None}, INTEGER),
        ({"const": None, "default": None, "title": None}, {"const": None, "default": None}),
        ({"type": ["STRING", "Null"], "$defs": None}, {"type": ["string", "null"]}),
        (
            {"type": "array", "items": INTEGER, "minItems": 1.0, "maxItems": 2.0},
            {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2},
        ),
    ],
    ids=str,
)
def test_what_programs_write_for_nothing_is_read_as_nothing(schema, meaning):
    assert PreparedSchema(schema).schema == PreparedSchema(meaning).schema


@pytest.mark.parametrize(
    ("schema", "rest", "left_out"),
    [
        ({"type": "array", "uniqueItems": True}, {"type": "array"}, "'uniqueItems' of the schema"),
        ({"items": {"not": INTEGER}}, {"items": {}}, "'not' of 'items' of the schema"),
        ({"if": {}, "then": INTEGER, "else": INTEGER}, {}, "'if' of the schema"),
        ({"contains": INTEGER, "minContains": 2}, {}, "'contains' of the schema"),
        ({"type": "string", "pattern": "(?=a)b"}, {"type": "string"}, "'pattern' of the schema"),
        (
            {"type": "string", "format": "iri"},
            {"type": "string"},
            "'format' \"iri\" of the schema",
        ),
        ({"$ref": "http://a/b", "title": "x"}, {"title": "x"}, "'$ref' of the schema"),
        ({"$ref": "#/$defs/A"}, {}, "'$ref' of the schema"),
        ({"items": {"$ref": "#A"}}, {"items": {}}, "'$ref' of 'items' of the schema"),
        ({"type": "str", "maxLength": 3}, {"maxLength": 3}, "'type' of the schema"),
        (
            {"type": "object", "minProperties": 2},
            {"type": "object"},
            "'minProperties' of the schema",
        ),
    ],
    ids=str,
)
def test_a_schema_that_is_not_strict_loses_what_nobody_enforces(schema, rest, left_out):
    prepared = PreparedSchema(schema, is_strict=False)
    assert prepared.schema == rest
    assert prepared.left_out == [left_out]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
        ({"properties": {"a": {"type": "int"}}}, "'type' of 'a' must be one of string, .* \"int\""),
        ({"properties": {"a": {"not": {"type": "string"}}}}, "'not' of 'a'"),
        ({"if": {}, "then": {"minimum": 1}}, "'if'"),
        ({"contains": INTEGER}, "'contains'"),
        ({"dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
        ({"type": "object", "propertyNames": {"maxLength": 1}}, "'propertyNames'"),
        ({"type": "object", "minProperties": 2}, "'minProperties'"),
        ({"anyOf": [{"unevaluatedProperties": False, "$ref": "#"}]}, "'unevaluatedProperties'"),
        ({"type": "string", "format": "iri"}, "'format' \"iri\""),
        ({"$ref": "http://example.com/schema"}, r"'\$ref'"),
        ({"properties": {"a": {"$ref": "#/$defs/A"}}}, r"'a' points to \"#/\$defs/A\", which"),
        ({"type": "string", "pattern": "(?=a)b"}, "'pattern' of the schema: look-ahead"),
        ({"properties": [1]}, "'properties' of the schema must be an object, got a list"),
        ({"items": 3}, "'items' of the schema must be an object, got 3"),
        (False, "allows no output"),
        (3, "must be an object"),
    ],
    ids=str,
)
def test_what_nobody_enforces_is_refused_by_name(schema, reason):
    with pytest.raises(SchemaError, match=reason):
        PreparedSchema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"enum": []},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "foo"},
        {"type": "string", "maxLength": -1},
        {"oneOf": [INTEGER, {"type": "number"}]},
        {"type": "string", "pattern": "^[a-c]{2}$", "maxLength": 1},
    ],
    ids=str,
)
def test_a_schema_without_a_possible_output_is_refused(schema):
    with pytest.raises(ValueError, match=r"\w"):
        compiled("json", schema)


def test_a_schema_nested_too_deeply_is_refused():
    schema: Any = {}
    for _ in range(150):
        schema = {"type": "array", "items": schema}
    with pytest.raises(SchemaError, match="100 levels"):
        PreparedSchema(schema)


@pytest.mark.parametrize(
    ("schema", "close", "closed"),
    [
        ({"type": "object", "properties": {"a": {}}}, "named", True),
        ({"type": "object"}, "named", False),
        ({"type": "object"}, "all", True),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "all", False),
        ({"type": "object", "additionalProperties": True}, "all", False),
        ({"properties": {"a": {}}, "type": "object", "anyOf": [{}]}, "all", False),
    ],
)
def test_objects_that_name_properties_are_closed(schema, close, closed):
    prepared = PreparedSchema(schema, close_objects=close).schema
    assert (prepared.get("additionalProperties") is False) == closed


def test_options_of_a_library_are_not_a_users_to_give():
    schema = {"x-guidance": {"coerce_one_of": True}, "oneOf": [INTEGER, {"type": "number"}]}
    with pytest.raises(ValueError, match="oneOf"):
        compiled("json", schema)


@pytest.mark.parametrize("options", [{"any_whitespace": True}, {"whitespace_pattern": "[ \n]?"}])
@pytest.mark.parametrize("schema", [{"type": "object", "properties": {"a": {"type": "array"}}}])
def test_whitespace_has_an_end(schema, options):
    grammar = compiled("json", schema, **options)
    matcher, output = open_matcher(grammar), b"{"
    for byte in output:
        matcher.accept(byte)
    with pytest.raises(ValueError, match=r"\w"):
        for _ in range(40):
            matcher.accept(ord(" "))
