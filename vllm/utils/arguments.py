"""Parse arguments: flags may use dashes or underscores, and errors suggest corrections."""

import argparse
import difflib
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from vllm.errors import ConfigError
from vllm.utils.help import HelpAction


def flag_of(name: str) -> str:
    """Return the command-line flag of a setting.

    >>> flag_of("max_bad_words")
    '--max-bad-words'
    """
    return "--" + name.replace("_", "-")


def add_switch(to: argparse._ActionsContainer, flag: str, help: str) -> None:
    """Declare a flag without a value, which is off by default."""
    to.add_argument(flag, action="store_true", help=help)


def add_number(
    to: argparse._ActionsContainer,
    flags: str | Sequence[str],
    help: str,
    default: float | None = None,
    kind: type = int,
) -> None:
    """Declare a flag with a number.

    Args:
        to: parser or group.
        flags: the flag, or all its names.
        help: what it does; the default is added.
        default: None: none. A float makes `kind` float.
        kind: int or float.
    """
    kind = float if isinstance(default, float) else kind
    shown = None if default is None else f"{default:.9g}"
    metavar = "N" if kind is int else "X"
    text = _with_default(help, shown)
    to.add_argument(*_names(flags), type=kind, default=default, metavar=metavar, help=text)


def add_text(
    to: argparse._ActionsContainer,
    flags: str | Sequence[str],
    help: str,
    default: str | None = None,
    *,
    metavar: str = "TEXT",
    **options: Any,
) -> None:
    """Declare a flag with a text.

    Args:
        to: parser or group.
        flags: the flag, or all its names.
        help: what it does; the default is added.
        default: None: none.
        metavar: name of the value in the help.
        options: further options of argparse.
    """
    text = _with_default(help, default)
    to.add_argument(*_names(flags), default=default, metavar=metavar, help=text, **options)


def add_truncation_flags(to: argparse._ActionsContainer) -> None:
    """Declare the flags that limit sampling to the most likely tokens."""
    text = "sample from the most likely tokens whose probabilities add up to this; 1: all"
    add_number(to, "--top-p", text, kind=float)
    add_number(to, "--top-k", "sample from this many of the most likely tokens; 0: all")


def _names(flags: str | Sequence[str]) -> Sequence[str]:
    return (flags,) if isinstance(flags, str) else flags


def _with_default(help: str, default: str | None) -> str:
    """Add the default to a help text that does not name one."""
    return help if default is None or "(default:" in help else f"{help} (default: {default})"


def check_smallest(values: object, **smallest: int) -> None:
    """Check that each named attribute is at least its number, or None.

    Raises:
        ConfigError: it is smaller.
    """
    for name, least in smallest.items():
        value = getattr(values, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")


_ON_OR_OFF = (argparse.BooleanOptionalAction, argparse._StoreTrueAction)
_BOOLEANS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Accepts `--max_model_len` for `--max-model-len`, and names the nearest flag if a flag is
    unknown.

    An error message has two lines and no usage, because with dozens of flags the usage would hide
    the error. Flags cannot be abbreviated, because a new flag would make an old command line
    ambiguous. A boolean flag may be followed by true or false, or another word of `_BOOLEANS`:
    `--flag=false` is `--no-flag`. `--flag.key value` is one key of a flag that takes a JSON object.
    """

    def __init__(self, *args: Any, add_help: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs, "add_help": False})
        if add_help:
            self.add_argument("-h", "--help", action=HelpAction)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse like argparse, but accept underscores in flags, and true or false after boolean
        flags.
        """
        tokens = _with_dashes(sys.argv[1:] if args is None else args)
        tokens = self._with_objects(tokens)
        return super().parse_known_args(self._without_booleans(tokens), namespace)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """Parse like argparse; exit with code 2 if there are unknown arguments."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown, parsed)
        return parsed

    def flag_names(self) -> set[str]:
        """Return the names of all flags, including flags of subcommands, as attributes of a
        namespace."""
        names: set[str] = set()
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    names |= parser.flag_names()
            elif any(flag.startswith("--") for flag in action.option_strings):
                names.add(action.dest)
        return names

    def _with_objects(self, tokens: Sequence[str]) -> list[str]:
        """Rewrite `--flag.a.b value` as `--flag '{"a": {"b": value}}'`.

        Several keys of a flag, and an object given to the flag itself, become one object.
        """
        end = tokens.index("--") if "--" in tokens else len(tokens)
        result: list[str] = []
        objects: dict[str, dict[str, Any]] = {}
        at = 0
        while at < end:
            token, at = tokens[at], at + 1
            name, equals, value = token.partition("=")
            flag, dot, keys = name.partition(".")
            if not (dot and flag.startswith("-") and flag in self._option_string_actions):
                result.append(token)
                continue
            if not equals:
                if at == end:
                    self.error(f"{name} must be followed by a value")
                value, at = tokens[at], at + 1
            inner = objects.setdefault(flag, {})
            *parents, last = keys.replace("-", "_").split(".")
            for key in parents:
                inner = inner.setdefault(key, {})
                if not isinstance(inner, dict):
                    self.error(f"{name}: {key!r} was given a value, so it has no keys")
            inner[last] = _json_or_text(value)
        for flag, given in objects.items():
            if flag in result[:-1]:
                whole = _json_or_text(result[result.index(flag) + 1])
                if isinstance(whole, dict):
                    del result[(index := result.index(flag)) : index + 2]
                    given = _merged(whole, given)
            result.append(f"{flag}={json.dumps(given)}")
        return [*result, *tokens[end:]]

    def _without_booleans(self, tokens: Sequence[str]) -> list[str]:
        """Rewrite `--flag=false` and `--flag false` as `--no-flag`, and `--flag=true` and `--flag
        true` as `--flag`.
        """
        end = tokens.index("--") if "--" in tokens else len(tokens)
        result: list[str] = []
        at = 0
        while at < end:
            flag, equals, value = tokens[at].partition("=")
            action, at = self._option_string_actions.get(flag), at + 1
            if not isinstance(action, _ON_OR_OFF):
                result.append(tokens[at - 1])
                continue
            if not equals and at < end and tokens[at].lower() in _BOOLEANS:
                value, at = tokens[at], at + 1
            elif equals and value.lower() not in _BOOLEANS:
                self.error(
                    f"{flag} must be given without a value, or with true or false, got {value!r}"
                )
            if _BOOLEANS.get(value.lower(), True):
                result.append(flag)
            else:
                result += _opposite(flag, action)
        return [*result, *tokens[end:]]

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Convert a value like argparse, but say in plain words that it is no number."""
        kind = {int: "an integer", float: "a number"}.get(getattr(action, "type", None))  # type: ignore[arg-type]
        if kind is None:
            return super()._get_value(action, arg_string)
        try:
            return action.type(arg_string)  # type: ignore[operator,misc]
        except ValueError:
            raise argparse.ArgumentError(action, f"must be {kind}, got {arg_string!r}") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check a value like argparse, but name the nearest choice in the error."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        text = f"invalid choice: {str(value)!r}. {hint}Choose from {', '.join(choices)}"
        raise argparse.ArgumentError(action, text)

    def error(self, message: str) -> NoReturn:
        """Print the error and a hint to `--help`, and exit with code 2."""
        self.exit(2, f"error: {message}\n(see '{self.prog} --help')\n")

    def _refuse(self, unknown: list[str], parsed: argparse.Namespace) -> NoReturn:
        parser = self._chosen(parsed)
        known = [f for f in parser._option_string_actions if f.startswith("--")]
        flags = [token.partition("=")[0] for token in unknown if token.startswith("-")]
        hints = []
        for flag in flags or unknown:
            near = difflib.get_close_matches(flag, known, n=1)
            hints.append(f"{flag} (did you mean {near[0]}?)" if near else flag)
        plural = "s" if len(hints) > 1 else ""
        parser.error(f"unrecognized argument{plural}: {', '.join(hints)}")

    def _chosen(self, parsed: argparse.Namespace) -> "FlexibleArgumentParser":
        """Return the parser of the chosen subcommand. The subparsers must have a `dest`."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                chosen = action.choices.get(getattr(parsed, action.dest, None) or "")
                if isinstance(chosen, FlexibleArgumentParser):
                    return chosen._chosen(parsed)
        return self


def _opposite(flag: str, action: argparse.Action) -> list[str]:
    """Return the opposite of a boolean flag in a list; an empty list if it has none."""
    opposite = flag.replace("--no-", "--", 1) if flag.startswith("--no-") else f"--no-{flag[2:]}"
    return [opposite] if opposite in action.option_strings else []


def _with_dashes(tokens: Iterable[str]) -> list[str]:
    """Replace underscores by dashes in flag names; not in values, and not after a bare `--`."""
    result: list[str] = []
    verbatim = False
    for token in tokens:
        verbatim = verbatim or token == "--"
        if token.startswith("--") and not verbatim:
            flag, equals, value = token.partition("=")
            flag, dot, keys = flag.partition(".")
            token = flag.replace("_", "-") + dot + keys + equals + value
        result.append(token)
    return result


def _json_or_text(value: str) -> Any:
    """Return what a text means as JSON; the text itself if it is not JSON.

    >>> _json_or_text("true"), _json_or_text("xgrammar")
    (True, 'xgrammar')
    """
    try:
        return json.loads(value)
    except ValueError:
        return value


def _merged(whole: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return two nested objects as one; a value of the second one counts.

    >>> _merged({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}})
    {'a': {'b': 1, 'c': 3}}
    """
    found = dict(whole)
    for key, value in more.items():
        old = found.get(key)
        is_nested = isinstance(old, dict) and isinstance(value, dict)
        found[key] = _merged(old, value) if is_nested and old is not None else value
    return found
