"""Random JSON schemas that can be satisfied."""

import random
from typing import Any

_NAMES = ["a", "name", "id", "some_value", "é", 'q"', "x y"]
_PATTERNS = ["^[a-z]{1,5}$", r"^\d{2}-\d{2}$", "^(yes|no)$", "^[A-Z]\\w*$"]
_FORMATS = ["date-time", "time", "ipv4", "uuid", "email"]


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema of any kind, whose constraints do not contradict each other."""
    kinds = [_integer, _number, _string, _fixed, _simple]
    if depth < 3:
        kinds += [_object, _object, _array, _any_of]
    if depth == 0:
        kinds = [_object, _object, _array, _any_of, _recursive]
    return rng.choice(kinds)(rng, depth)


def random_pattern(rng: random.Random, depth: int = 0) -> str:
    """Return a regular expression made of the usual parts of patterns."""
    atoms = [r"\d", r"\w", "[a-f]", "[^,;]", "x", "foo", r"\.", "é", "."]
    if depth < 2:
        atoms += [f"(?:{random_pattern(rng, depth + 1)})" for _ in range(3)]
    times = ["", "", "", "{2}", "{1,3}", "?"]
    branches = [
        "".join(rng.choice(atoms) + rng.choice(times) for _ in range(rng.randint(1, 4)))
        for _ in range(rng.choice([1, 1, 2]))
    ]
    return "|".join(branches)


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return {
        "type": "integer",
        **_some(rng, {"minimum": low, "maximum": low + rng.randint(8, 90)}),
        **_some(rng, {"multipleOf": rng.choice([2, 3, 5])}, 0.2),
    }


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = round(rng.uniform(-5, 5), 2)
    return {"type": "number", **_some(rng, {"minimum": low, "maximum": low + 3})}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    more: dict[str, Any] = rng.choice(
        [
            {},
            {"maxLength": rng.randint(1, 12)},
            {"minLength": 1, "maxLength": rng.randint(2, 12)},
            {"pattern": rng.choice(_PATTERNS)},
            {"format": rng.choice(_FORMATS)},
        ]
    )
    return {"type": "string", **more}


def _fixed(rng: random.Random, depth: int) -> dict[str, Any]:
    values = ["red", "grün", 1, -2.5, None, True, {"k": [1]}, 'with "quotes" and \\']
    if rng.random() < 0.3:
        return {"const": rng.choice(values)}
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def _simple(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null", ["integer", "null"], ["string", "boolean"]])}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
    }
    if rng.random() < 0.3:
        schema["additionalProperties"] = rng.choice([False, {"type": "integer"}])
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(rng, depth + 1),
        "minItems": least,
        "maxItems": least + rng.randint(0, 3),
    }


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


def _recursive(rng: random.Random, depth: int) -> dict[str, Any]:
    node = {
        "type": "object",
        "properties": {"value": random_schema(rng, 3), "next": {"$ref": "#/$defs/node"}},
        "required": ["value"],
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def _some(rng: random.Random, values: dict[str, Any], share: float = 0.5) -> dict[str, Any]:
    return values if rng.random() < share else {}
