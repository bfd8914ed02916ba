"""Test that arguments written as plain text get the types of the tool's schema."""

import json

import pytest

from tests.entrypoints.openai.tool_parsers.formats import extract
from tests.loops import loop_over
from vllm.entrypoints.openai.tool_parsers.argument_types import argument_to_json

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
DEFINITIONS = {
    "Name": STRING,
    "Alias": {"$ref": "#/$defs/Name"},
    "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, INTEGER]},
    "a/b": {"type": "boolean"},
}


def typed(text, schema):
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": DEFINITIONS}
    return json.loads(argument_to_json(text, "x", parameters))


ONLY_STRINGS = [
    STRING,
    {"type": ["string"]},
    {"type": ["string", "null"]},
    {"type": "string", "nullable": True},
    {"anyOf": [STRING, {"type": "null"}]},
    {"oneOf": [STRING, {"type": "null"}]},
    {"allOf": [STRING]},
    {"allOf": [STRING, {"minLength": 1}], "description": "d"},
    {"$ref": "#/$defs/Name"},
    {"$ref": "#/$defs/Alias", "default": "1"},
    {"anyOf": [{"$ref": "#/$defs/Alias"}, {"type": "null"}]},
    {"enum": ["a", "b"]},
    {"const": "a"},
    {"anyOf": [{"const": "a"}, {"enum": ["b"]}, STRING]},
]


@loop_over("schema", ONLY_STRINGS)
@loop_over("text", ["5", "true", "1.50", '{"a": 1}', "[1]", " x ", "", "0123", "NaN"])
def test_a_string_is_what_was_written(schema, text):
    assert typed(text, schema) == text


@loop_over(
    "text, schema, value",
    [
        ("5", INTEGER, 5),
        ("5.0", INTEGER, 5),
        ("-5.5", {"type": "number"}, -5.5),
        ("5", {"type": "number"}, 5),
        ("5", {"allOf": [{"type": "number"}, INTEGER]}, 5),
        ("True", {"type": "boolean"}, True),
        ("false", {"$ref": "#/$defs/a~1b"}, False),
        ("None", {"type": ["integer", "null"]}, None),
        ("null", {"anyOf": [STRING, {"type": "null"}]}, None),
        ("null", {"type": "string", "nullable": True}, None),
        ("null", STRING, "null"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("{'a': True, 'b': None}", {"type": "object"}, {"a": True, "b": None}),
        ("['a', 'b']", {"type": "array"}, ["a", "b"]),
        ("\n [1]\n ", {"type": "array"}, [1]),
        # Several types: the value becomes the first type that fits, or a string if none fits.
        ("5", {"type": ["string", "integer"]}, 5),
        ("5.5", {"type": ["string", "integer"]}, "5.5"),
        ("true", {"type": ["string", "integer"]}, "true"),
        ("[1]", {"anyOf": [STRING, {"type": "array"}]}, [1]),
        ("[1", {"anyOf": [STRING, {"type": "array"}]}, "[1"),
        # Enums and constants take precedence over types.
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1", {"enum": [1, 2]}, 1),
        ("1", {"enum": [1, "1"], "type": "string"}, "1"),
        ("true", {"enum": [True, "x"]}, True),
        ("x", {"enum": [True, "x"]}, "x"),
        ("5", {"const": "5"}, "5"),
        ("null", {"enum": ["a", None]}, None),
        # A schema that allows everything, or that is circular: a value that is JSON stays JSON.
        ("5", {}, 5),
        ("x", {}, "x"),
        ("5", True, 5),
        ("5", {"$ref": "#/$defs/Tree"}, 5),
        ("5", {"$ref": "#/nowhere"}, 5),
        ("5", {"type": "unheard of"}, 5),
        # A text that fits no type stays a string.
        ("five", INTEGER, "five"),
        ('"5"', INTEGER, "5"),
        ("5", {"type": "boolean"}, 5),
        ("1e999", {"type": "number"}, "1e999"),
        ("9" * 5000, INTEGER, "9" * 5000),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
    ],
)
def test_other_types(text, schema, value):
    found = typed(text, schema)
    assert (found, type(found)) == (value, type(value))


def test_an_argument_is_found_in_every_part_of_the_schema():
    inner = {"properties": {"x": STRING}}
    for parameters in (
        inner,
        {"$ref": "#/$defs/Inner", "$defs": {"Inner": inner}},
        {"allOf": [{"properties": {"y": INTEGER}}, inner]},
        {"anyOf": [{"properties": {"y": INTEGER}}, inner]},
        {"additionalProperties": STRING},
        {"properties": {"y": INTEGER}},  # a schema without the argument x
    ):
        assert argument_to_json("5", "x", parameters) == '"5"', parameters
    either = {"oneOf": [inner, {"properties": {"x": INTEGER}}]}
    assert argument_to_json("5", "x", either) == "5"
    assert argument_to_json("5", "x", {"type": "object"}) == "5", "it names no arguments"
    assert argument_to_json("5", "x", None) == "5", "there is no such tool"


def test_references_cannot_make_the_work_grow():
    names = [f"s{i}" for i in range(200)]
    definitions = {
        name: {"anyOf": [{"$ref": f"#/$defs/{after}"}] * 8}
        for name, after in zip(names, [*names[1:], names[0]], strict=True)
    }
    parameters = {"$ref": "#/$defs/s0", "properties": {"x": {"$ref": "#/$defs/s0"}}}
    assert argument_to_json("5", "x", {**parameters, "$defs": definitions}) == "5"
    nameless = {"$ref": "#/$defs/s0", "properties": {"x": {}}, "$defs": definitions}
    assert argument_to_json("5", "y", nameless) == '"5"'


UNTYPED = {
    "qwen3_coder": "<function=f><parameter=x>{}</parameter></function>",
    "seed_oss": "<seed:tool_call><function=f><parameter=x>{}</parameter></function>",
    "minimax_m2": '<invoke name="f"><parameter name="x">{}</parameter></invoke>',
    "step3": '<steptml:invoke name="f"><steptml:parameter name="x">{}</steptml:parameter>'
    "</steptml:invoke>",
    "glm45": "<tool_call>f\n<arg_key>x</arg_key><arg_value>{}</arg_value></tool_call>",
    "longcat": "<longcat_tool_call>f<longcat_arg_key>x</longcat_arg_key>"
    "<longcat_arg_value>{}</longcat_arg_value></longcat_tool_call>",
    "deepseek_v32": '<｜DSML｜invoke name="f"><｜DSML｜parameter name="x">{}</｜DSML｜parameter>'
    "</｜DSML｜invoke>",
}


@pytest.mark.parametrize("name", UNTYPED)
@pytest.mark.parametrize(("schema", "value"), [(INTEGER, 5), (ONLY_STRINGS[4], "5")])
def test_every_format_without_types_uses_the_schema(name, schema, value):
    function = {"name": "f", "parameters": {"properties": {"x": schema}}}
    request = {"tools": [{"type": "function", "function": function}]}
    [[_, arguments]] = extract(name, UNTYPED[name].format("5"), type("Request", (), request))[1]
    assert json.loads(arguments) == {"x": value}


def test_a_tag_that_names_a_type_goes_before_the_schema():
    text = (
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="x" string="{}">5</｜DSML｜parameter>'
        "</｜DSML｜invoke>"
    )
    function = {"name": "f", "parameters": {"properties": {"x": STRING}}}
    request = type("Request", (), {"tools": [{"type": "function", "function": function}]})
    for is_string, value in (("true", '"5"'), ("false", "5")):
        _, calls = extract("deepseek_v32", text.format(is_string), request)
        assert calls == [["f", f'{{"x": {value}}}']]
