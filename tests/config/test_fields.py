"""Test how flags and help texts are read from a config class, and how values are converted."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from vllm.config import VllmConfig
from vllm.config.fields import config_fields, config_sections
from vllm.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Example:
    """A config class with one field of each kind."""

    size: int = field(default=3, metadata={"aliases": ("-s",)})
    """Size
    in tokens."""

    max_model_len: int | None = None
    """Longest."""

    share: float = 0.5
    name: str | None = None
    mode: Literal["fast", "slow"] = "fast"
    flag: bool = True
    words: tuple[str, ...] = ("a",)
    table: Mapping[str, object] = field(default_factory=dict)
    secret: str | bool | None = field(default=None, repr=False)
    decided: int = field(metadata={"auto": True})
    internal: int = field(default=0, metadata={"cli": False})
    """Not for users."""


FIELDS = {f.name: f for f in config_fields(Example)}


def test_fields_for_users_come_in_source_order():
    assert list(FIELDS) == [
        "size", "max_model_len", "share", "name", "mode", "flag", "words", "table", "secret",
        "decided",
    ]  # fmt: skip


def test_the_string_below_a_field_is_its_help_on_one_line():
    assert FIELDS["size"].help == "Size in tokens."
    assert FIELDS["share"].help == ""


def test_types_become_kinds_choices_flags_and_aliases():
    assert {name: f.kind for name, f in FIELDS.items()} == {
        "size": "int",
        "max_model_len": "size",
        "share": "float",
        "name": "str",
        "mode": "str",
        "flag": "bool",
        "words": "strings",
        "table": "mapping",
        "secret": "str_or_bool",
        "decided": "int",
    }
    assert FIELDS["mode"].choices == ("fast", "slow")
    assert FIELDS["max_model_len"].flag == "--max-model-len"
    assert FIELDS["size"].aliases == ("-s",)
    assert [name for name, f in FIELDS.items() if not f.is_shown] == ["secret"]


def test_defaults_are_those_of_the_class_and_none_where_the_platform_decides():
    assert FIELDS["table"].default == {}
    assert FIELDS["words"].default == ("a",)
    assert FIELDS["decided"].auto
    assert FIELDS["decided"].default is None


@pytest.mark.parametrize("name", FIELDS)
def test_none_is_the_default(name):
    assert FIELDS[name].convert(None) == FIELDS[name].default


@pytest.mark.parametrize(
    ("name", "given", "held"),
    [
        ("size", 5, 5),
        ("size", "5", 5),
        ("max_model_len", 4096, 4096),
        ("max_model_len", "4096", 4096),
        ("max_model_len", "8k", 8000),
        ("max_model_len", "8K", 8192),
        ("max_model_len", "1m", 1_000_000),
        ("max_model_len", "1M", 1_048_576),
        ("max_model_len", "25.6k", 25_600),
        ("share", 1, 1.0),
        ("share", "0.25", 0.25),
        ("name", "x", "x"),
        ("name", Path("/a/b"), "/a/b"),
        ("flag", False, False),
        ("words", "one", ("one",)),
        ("words", ["one", "two"], ("one", "two")),
        ("secret", True, True),
        ("secret", "hf_x", "hf_x"),
        ("table", {"a": 1}, {"a": 1}),
        ("table", '{"a": [1, null]}', {"a": [1, None]}),
    ],
)
def test_values_are_held_in_the_type_of_the_field(name, given, held):
    result = FIELDS[name].convert(given)
    assert result == held
    assert type(result) is type(held)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("size", "8k", "size must be an integer, got '8k'"),
        ("size", 5.0, "size must be an integer, got 5.0"),
        ("size", True, "size must be an integer, got True"),
        ("max_model_len", "0.0001k", "max_model_len must be an integer, got '0.0001k'"),
        ("max_model_len", "8kb", "max_model_len must be an integer, got '8kb'"),
        ("share", "half", "share must be a number, got 'half'"),
        ("share", True, "share must be a number, got True"),
        ("name", 7, "name must be a string, got 7"),
        ("flag", "true", "flag must be true or false, got 'true'"),
        ("flag", 1, "flag must be true or false, got 1"),
        ("words", [1], "words must be one or more strings, got [1]"),
        ("table", [1], "table must be a JSON object (a dict), got [1]"),
        ("table", "[1]", "table must be a JSON object (a dict), got [1]"),
        (
            "table",
            '{"a": }',
            'table must be a JSON object: Expecting value at character 7 of {"a": }',
        ),
    ],
)
def test_a_value_of_another_type_is_an_error_that_names_the_field(name, given, message):
    with pytest.raises(ConfigError) as failure:
        FIELDS[name].convert(given)
    assert str(failure.value) == message


def test_a_torch_dtype_is_taken_by_its_name():
    torch = pytest.importorskip("torch")
    assert FIELDS["name"].convert(torch.bfloat16) == "bfloat16"


def test_every_setting_of_the_engine_is_documented_and_named_once():
    settings = [f for s in config_sections(VllmConfig).values() for f in config_fields(s)]
    assert [f.name for f in settings if not f.help] == []
    names = [f.name for f in settings]
    assert len(names) == len(set(names))
    assert len(names) > 30
