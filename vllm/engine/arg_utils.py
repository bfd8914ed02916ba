"""Define the arguments of an engine: the keywords of `LLM()` and the flags of the commands.

Every argument is a field of a config class (`vllm.config.fields`); adding a field there adds the
keyword and the flag. This module parses arguments; `vllm.engine.resolve.config` resolves them for a
given model. Importing it imports neither torch nor transformers.
"""

import argparse
import difflib
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.config import VllmConfig
from vllm.config.fields import ConfigField, config_fields, config_sections
from vllm.engine.resolve.compat_args import COMPAT_ARGUMENTS, CompatArgument, accept
from vllm.engine.resolve.newer_args import OBJECTS, RENAMED, TEXT_ONLY, is_newer, with_own_names
from vllm.errors import ConfigError
from vllm.utils.arguments import flag_of

if TYPE_CHECKING:
    from vllm.platforms import Platform

_Parser = TypeVar("_Parser", bound=argparse.ArgumentParser)
_Class = TypeVar("_Class", bound=type)

_FIELDS: dict[str, ConfigField] = {
    f.name: f for section in config_sections(VllmConfig).values() for f in config_fields(section)
}


@dataclass(frozen=True)
class _Part:
    """An argument of the Gaudi fork that is one key of a mapping in this engine."""

    field: str
    key: str
    read: Callable[[str], object]


_PARTS: dict[str, _Part] = {
    "rope_scaling": _Part(
        "hf_overrides", "rope_scaling", lambda text: _FIELDS["hf_overrides"].convert(text)
    ),
    "rope_theta": _Part("hf_overrides", "rope_theta", float),
    "speculative_model": _Part("speculative_config", "model", str),
    "num_speculative_tokens": _Part("speculative_config", "num_speculative_tokens", int),
    "speculative_model_quantization": _Part("speculative_config", "quantization", str),
    "speculative_max_model_len": _Part("speculative_config", "max_model_len", int),
    "ngram_prompt_lookup_max": _Part("speculative_config", "prompt_lookup_max", int),
    "ngram_prompt_lookup_min": _Part("speculative_config", "prompt_lookup_min", int),
    "speculative_disable_by_batch_size": _Part("speculative_config", "disable_by_batch_size", int),
}
"""Arguments of the fork that are added to a mapping: name -> part."""
_TASK_WORDS: dict[str, dict[str, str | None]] = {
    "convert": {
        "auto": None,
        "none": None,
        "embed": "embed",
        "classify": "classify",
        "reward": "reward",
    },
    "runner": {"auto": None, "generate": "generate", "pooling": "pooling"},
}
"""Arguments of newer releases of vLLM instead of `task`: name -> value -> task. The first one that
names a task decides."""


def _with_config_fields(cls: _Class) -> _Class:
    cls.__annotations__ = dict.fromkeys(_FIELDS, Any)
    for name, config_field in _FIELDS.items():
        default = config_field.default
        if isinstance(default, Mapping):
            setattr(cls, name, field(default_factory=dict))
        else:
            setattr(cls, name, field(default=default, repr=config_field.is_shown))
    return cls


@dataclass(init=False)
@_with_config_fields
class EngineArgs:
    """All arguments of an engine, not yet checked against the model and the device.

    Keywords are the fields of the config classes, documented there and in docs/engine_arguments.md.
    None always means "not given". Arguments of the Gaudi fork that are not fields are handled by
    `vllm.engine.resolve.compat_args`.

    Raises:
        ConfigError: an argument is not known (names the nearest one), has the wrong type, or asks
            for a feature that is not available.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        settings = with_own_names({**settings, "model": model})
        # In the fork, an empty value means "not given".
        if task := _task_of(settings):
            settings["task"] = task
        parts: dict[str, dict[str, Any]] = {}
        for name, part in _PARTS.items():
            if value := settings.pop(name, None):
                parts.setdefault(part.field, {})[part.key] = value
        for name, values in parts.items():
            given: Any = _FIELDS[name].convert(settings.get(name))
            settings[name] = {**given, **values}
        for name in settings:
            if name not in _FIELDS and name not in COMPAT_ARGUMENTS:
                raise ConfigError(_unknown(name))
        if settings.get("enable_reasoning") and not settings.get("reasoning_parser"):
            raise ConfigError(
                "enable_reasoning=True needs reasoning_parser, the name of a parser of "
                "vllm.reasoning, such as 'qwen3'; or leave enable_reasoning out"
            )
        for name, value in settings.items():
            if name in COMPAT_ARGUMENTS:
                accept(name, value)
        for name, config_field in _FIELDS.items():
            setattr(self, name, config_field.convert(settings.get(name)))

    @staticmethod
    def add_cli_args(parser: _Parser) -> _Parser:
        """Add a flag for every argument, grouped by config class, and return the parser."""
        for section in config_sections(VllmConfig).values():
            settings = config_fields(section)
            if not settings:  # all of its settings are environment variables
                continue
            group = parser.add_argument_group(section.__name__, (section.__doc__ or "").strip())
            for config_field in settings:
                add_flag(group, config_field)
        for name, part in _PARTS.items():
            flag, help = flag_of(name), argparse.SUPPRESS
            convert = _checked(part.read, part.field)
            parser.add_argument(flag, type=convert, help=help, default=help)
        for name, words in _TASK_WORDS.items():
            help = argparse.SUPPRESS
            parser.add_argument(flag_of(name), choices=list(words), help=help, default=help)
        for argument in COMPAT_ARGUMENTS.values():
            add_compat_flag(parser, argument)
        _add_newer_flags(parser)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        """Create the arguments from a parsed command line. Flags that are not engine arguments are
        ignored.
        """
        known = _FIELDS.keys() | _PARTS.keys() | _TASK_WORDS.keys() | COMPAT_ARGUMENTS.keys()
        given = vars(args).items()
        return cls(**{name: value for name, value in given if name in known or is_newer(name)})

    def create_engine_config(self, platform: "Platform | None" = None) -> VllmConfig:
        """Create the complete config of the engine: read the model's config, ask the platform,
        resolve every value.

        Downloads the model if it is a name on the hub. Does not change this object.

        Args:
            platform: platform of the device; None: the one that the argument `device` names.

        Raises:
            ConfigError: the engine cannot start with these arguments.
        """
        from vllm.engine.resolve.config import resolve_config

        return resolve_config(self._settings(), platform)

    def create_early_config(self) -> VllmConfig | None:
        """Return the config if it can be resolved without transformers and downloads, else None.

        Raises:
            ConfigError: the engine cannot start with these arguments, as far as can be checked
                early.
        """
        from vllm.engine.resolve.early import resolve_early

        return resolve_early(self._settings())

    def without_streams(self) -> "EngineArgs":
        """Return the arguments for an engine whose outputs are read only when they are complete.

        Because no client waits for a single token, the time of a step is limited only if the user
        set a limit.
        """
        if self.max_step_ms is not None:
            return self
        found = copy(self)
        found.max_step_ms = 0
        return found

    def _settings(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


class AsyncEngineArgs(EngineArgs):
    """The arguments of `EngineArgs`, for `AsyncLLM`."""


def _task_of(settings: dict[str, Any]) -> str | None:
    """Remove the arguments of `_TASK_WORDS`, and return the task that they name, if any.

    Raises:
        ConfigError: a value is not known, or contradicts `task`.
    """
    asked = settings.get("task")
    found = None
    for name, words in _TASK_WORDS.items():
        value = settings.pop(name, None)
        if value is not None and value not in words:
            raise ConfigError(f"{name} must be one of {', '.join(words)}, got {value!r}")
        found = found or words.get(value)
    if found is not None and asked not in (None, "auto", found):
        raise ConfigError(
            f"task={asked!r} and runner or convert, which ask for {found!r}, are both given: leave "
            "one out"
        )
    return found


def _unknown(name: str) -> str:
    names = [*_FIELDS, *_PARTS, *COMPAT_ARGUMENTS, *RENAMED, *OBJECTS, TEXT_ONLY]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown engine argument {name!r}{hint}"


_METAVARS = {
    "int": "N",
    "size": "N[kKmM]",
    "float": "X",
    "str": "TEXT",
    "mapping": "JSON",
    "counts": "NAME=N,...",
}


def add_flag(group: argparse._ArgumentGroup, config_field: ConfigField) -> None:
    """Add the flag of a config field to a group of a parser."""
    options: dict[str, Any] = {"default": config_field.default}
    if config_field.kind == "bool":
        options["action"] = argparse.BooleanOptionalAction
    elif config_field.choices:
        options["choices"] = config_field.choices
        if config_field.same_as:
            options["type"] = lambda text: config_field.same_as.get(text, text)
    elif config_field.kind == "str_or_bool":
        options.update(nargs="?", const=True, metavar="TEXT")
    elif config_field.kind == "strings":
        options.update(nargs="+", metavar="TEXT")
    else:
        metavar = _METAVARS[config_field.kind]
        options.update(type=_checked(config_field.convert, config_field.name), metavar=metavar)
    action = group.add_argument(config_field.flag, *config_field.aliases, **options)
    # Set after creation: in some versions of Python, BooleanOptionalAction appends the default to
    # the help by itself.
    action.help = f"{config_field.help} {describe_default(config_field)}".replace("%", "%%")


def describe_default(config_field: ConfigField) -> str:
    """Return the default of a field for its help text; empty if the help mentions it."""
    default = config_field.default
    if default in (None, "", {}, ()):
        return ""  # the help text itself describes the default
    if isinstance(default, tuple):
        default = " ".join(default)
    return f"(default: {default})"


def add_compat_flag(parser: argparse.ArgumentParser, argument: CompatArgument) -> None:
    """Add a flag that `--help` does not list, and that is absent from the namespace unless
    given.
    """
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    off = argument.off
    if isinstance(off, bool):
        options["action"] = argparse.BooleanOptionalAction
    elif argument.read is not None:
        options["type"] = _checked(argument.read)
    elif isinstance(off, tuple):
        options["nargs"] = "+"
    elif isinstance(off, dict):
        options["type"] = _checked(_FIELDS["hf_overrides"].convert, "hf_overrides")
    elif off is not None:
        options["type"] = type(off)
    parser.add_argument(argument.flag, *argument.aliases, **options).help = argparse.SUPPRESS


def _add_newer_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of newer releases that are other flags here. `--help` does not list them."""
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for name, own in RENAMED.items():
        parser.add_argument(flag_of(name), type=_checked(_FIELDS[own].convert, own), **options)
    read = _checked(_FIELDS["hf_overrides"].convert, "hf_overrides")
    for name in OBJECTS:
        parser.add_argument(flag_of(name), type=read, **options)
    action = argparse.BooleanOptionalAction
    parser.add_argument(flag_of(TEXT_ONLY), action=action, **options).help = argparse.SUPPRESS


def _checked(convert: Callable[[str], object], name: str = "") -> Callable[[str], object]:
    """Wrap `convert` so that argparse shows the messages of its errors.

    argparse also prints the flag, so `name` is removed from the beginning of the message.
    """

    def parse(text: str) -> object:
        try:
            return convert(text)
        except (ConfigError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(f"{name} ")) from None

    return parse
