"""Read the fields of the config classes: name, type, default and help of each; and check values.

The command-line flags, the keywords of `EngineArgs` and the reference in docs/ are generated from
them. A field is included unless its metadata has `{"cli": False}`. `{"auto": True}` marks a field
that the platform decides if it is not given; `{"aliases": ("-x",)}` adds other flags;
`{"same_as": {"hf": "auto"}}` accepts values of newer releases. Independent of argparse and the
engine.
"""

import ast
import inspect
import json
import os
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from dataclasses import field as dataclass_field
from functools import cache
from typing import Any, Literal, Protocol

from vllm.errors import ConfigError
from vllm.utils.arguments import flag_of

FieldKind = Literal[
    "bool", "int", "size", "float", "str", "str_or_bool", "strings", "mapping", "counts"
]

_KINDS: dict[object, FieldKind] = {bool: "bool", int: "int", float: "float", str: "str"}
_SIZES = frozenset({"max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes"})
"""Integers that may be written with a unit, such as 8k."""
_COUNTS = frozenset({"limit_mm_per_prompt"})
"""Mappings that may be written as numbers by name, such as image=4."""


@dataclass(frozen=True, kw_only=True)
class ConfigField:
    """One setting that users can change."""

    name: str
    kind: FieldKind
    """Kind of value. size: an integer that may be written as 8k; strings: a tuple of them;
    str_or_bool: true where the flag has no value; counts: a mapping that may be written as numbers
    by name."""
    default: object
    """Default value; None also if the platform decides."""
    help: str
    choices: tuple[str, ...] = ()
    """All accepted values, or empty."""
    auto: bool = False
    """Whether the platform decides if the value is not given."""
    aliases: tuple[str, ...] = ()
    """Names of further flags."""
    same_as: Mapping[str, object] = dataclass_field(default_factory=dict)
    """Values of newer releases, as text -> what they mean here; None: the default."""
    is_shown: bool = True
    """Whether the value may be printed with the settings. False: it is a secret."""

    @property
    def flag(self) -> str:
        """The command-line flag, without aliases and without its `--no-` variant."""
        return flag_of(self.name)

    def convert(self, value: object) -> object:
        """Convert a value given in Python or as a string to the type of the field; None gives the
        default.

        Raises:
            ConfigError: the value has another type. Ranges are checked by the config class.
        """
        if type(value) in (str, int):
            value = self.same_as.get(str(value).strip(), value)
        value = self.default if value is None else value
        if value is None:
            return None
        try:
            return _CONVERTERS[self.kind](value)
        except ValueError as error:
            raise ConfigError(f"{self.name} {error}") from None


@cache
def config_sections(config_class: type) -> dict[str, type]:
    """Return the config classes of a composed config, by attribute name."""
    hints = typing.get_type_hints(config_class)
    return {f.name: hints[f.name] for f in fields(config_class)}


@cache
def config_fields(config_class: type) -> tuple[ConfigField, ...]:
    """Return the settings of one config class, in the order of the source."""
    docs = _attribute_docs(config_class)
    hints = typing.get_type_hints(config_class)
    return tuple(
        _read_field(f, hints[f.name], docs.get(f.name, ""))
        for f in fields(config_class)
        if f.metadata.get("cli", True)
    )


def _read_field(field: "Field[object]", annotation: object, help: str) -> ConfigField:
    auto = bool(field.metadata.get("auto"))
    if field.default_factory is not MISSING:
        default: object = field.default_factory()
    elif field.default is not MISSING:
        default = field.default
    else:
        assert auto, f"{field.name} has neither a default nor {{'auto': True}}"
        default = None
    kind, choices = _read_type(annotation)
    return ConfigField(
        name=field.name,
        kind="size" if field.name in _SIZES else "counts" if field.name in _COUNTS else kind,
        default=default,
        help=help,
        choices=choices,
        auto=auto,
        aliases=field.metadata.get("aliases", ()),
        same_as=field.metadata.get("same_as", {}),
        is_shown=field.repr,
    )


def _read_type(annotation: object) -> tuple[FieldKind, tuple[str, ...]]:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = {a for a in args if a is not type(None)}
        return ("str_or_bool", ()) if inner == {str, bool} else _read_type(*inner)
    if origin is Literal:
        return "str", args
    if origin is tuple:
        assert args == (str, Ellipsis), f"no flag can be made for {annotation}"
        return "strings", ()
    if origin is Mapping:
        return "mapping", ()
    return _KINDS[annotation], ()


def _attribute_docs(config_class: type) -> dict[str, str]:
    """Return the docstring of each field as one line. Python itself does not keep them."""
    (class_def,) = ast.parse(textwrap.dedent(inspect.getsource(config_class))).body
    assert isinstance(class_def, ast.ClassDef)
    docs = {}
    for field, below in zip(class_def.body, class_def.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[field.target.id] = " ".join(str(below.value.value).split())
    return docs


def _to_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(f"must be true or false, got {value!r}")


def _to_int(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d+\s*", value):
        return int(value)
    raise ValueError(f"must be an integer, got {value!r}")


_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def _to_size(value: object) -> int:
    """Convert to an integer. A string may end with k (1000), K (1024), m (1000^2), M (1024^2), g or
    G.
    """
    match = (
        re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG])", value.strip()) if type(value) is str else None
    )
    if match is None:
        return _to_int(value)
    number = float(match[1]) * _UNITS[match[2]]
    if number != int(number):
        raise ValueError(f"must be an integer, got {value!r}")
    return int(number)


def _to_float(value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
    raise ValueError(f"must be a number, got {value!r}")


def _to_str(value: object) -> str:
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    # A torch dtype is recognised by its name, because this package must not import torch.
    if (name := str(value)).startswith("torch."):
        return name.removeprefix("torch.")
    raise ValueError(f"must be a string, got {value!r}")


def _to_str_or_bool(value: object) -> str | bool:
    return value if isinstance(value, bool) else _to_str(value)


def _to_strings(value: object) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if isinstance(values, (list, tuple)) and all(isinstance(v, str) for v in values):
        return tuple(values)
    raise ValueError(f"must be one or more strings, got {value!r}")


def _to_mapping(value: object) -> Mapping[str, object]:
    """Convert to a mapping, from a mapping or the text of a JSON object."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"must be a JSON object: {error.msg} at character {error.pos + 1} of {error.doc}"
            ) from None
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise ValueError(f"must be a JSON object (a dict), got {value!r}")


def _to_counts(value: object) -> Mapping[str, object]:
    """Convert to counts by name, from a mapping, its JSON, `image=4,video=0`, or a number of
    images.
    """
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        pairs = [pair.rpartition("=") for pair in value.split(",")]
        if all(re.fullmatch(r"\s*\d+\s*", number) for *_, number in pairs):
            return {name.strip() or "image": int(number) for name, _, number in pairs}
    elif isinstance(value, int) and not isinstance(value, bool):
        return {"image": value}
    else:
        return _to_mapping(value)
    raise ValueError(
        'must be integers by name, such as image=4,video=0 or {"image": 4}, or the number of '
        f"images; got {value!r}"
    )


_CONVERTERS: dict[FieldKind, Callable[[object], object]] = {
    "bool": _to_bool,
    "int": _to_int,
    "size": _to_size,
    "float": _to_float,
    "str": _to_str,
    "str_or_bool": _to_str_or_bool,
    "strings": _to_strings,
    "mapping": _to_mapping,
    "counts": _to_counts,
}


def check_at_least(config: object, smallest: int, *names: str) -> None:
    """Check that each named field is an int of at least `smallest`."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
            raise ConfigError(f"{name} must be an integer of at least {smallest}, got {value!r}")


def check_one_of(config: object, name: str, choices: tuple[Any, ...]) -> None:
    """Check that the named field has one of `choices`."""
    value = getattr(config, name)
    if value not in choices:
        accepted = ", ".join(str(choice) for choice in choices)
        raise ConfigError(f"{name} must be one of {accepted}, got {value!r}")


class _StepBudget(Protocol):
    """The token limits of a step and of a request."""

    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def enable_chunked_prefill(self) -> bool: ...


def check_longest_prompt(config: _StepBudget) -> None:
    """Check that the longest prompt fits into a step, if prompts cannot run in chunks."""
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < config.max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens ({config.max_num_batched_tokens}) is less than "
            f"max_model_len ({config.max_model_len}) and chunked prefill is off: a long prompt "
            f"could never run. Raise the first, lower the second, or enable chunked prefill."
        )
