"""Declares one environment variable, and reads its text. Reads no environment."""

import math
import typing
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from vllm.errors import ConfigError

WORDS = {
    **dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n", "off"), False),
}
"""Accepted values of a switch."""


LARGEST = 2**31 - 1
"""Largest integer of a variable without a limit of its own: C code takes some of them."""


def env(
    default: Any,
    help: str,
    choices: tuple[str, ...] = (),
    at_least: float | None = None,
    at_most: float | None = None,
    *,
    section: str,
    may_be_empty: bool = False,
    means_true: tuple[str, ...] = (),
) -> Any:
    """Declare one variable. A default of None means "not set", and so does an empty value unless it
    `may_be_empty`. `means_true` has more values that turn a switch on."""
    metadata = {
        "help": help,
        "choices": choices,
        "at_least": at_least,
        "at_most": at_most,
        "section": section,
        "may_be_empty": may_be_empty,
        "means_true": means_true,
    }
    return field(default=default, metadata=metadata)


def parse(name: str, raw: str, annotation: Any, metadata: Mapping[str, Any]) -> Any:
    """Parse the value of a variable.

    Args:
        name: name of the variable.
        raw: text of the variable.
        annotation: type of the variable, or a union of this type and None.
        metadata: metadata from `env`.

    Raises:
        ConfigError: it does not parse; names variable, value and accepted form.
    """
    options = [a for a in typing.get_args(annotation) if a is not type(None)]
    type_ = options[0] if options else annotation
    text = raw.strip()
    if choices := metadata["choices"]:
        for choice in choices:
            if text.lower() == choice.lower():
                return choice
        raise ConfigError(f"{name}={raw!r}: expected one of {', '.join(choices)}")
    if type_ is str:
        return raw  # not stripped: a prefix may end with a space
    try:
        words = {**WORDS, **dict.fromkeys(metadata["means_true"], True)}
        value = words[text.lower()] if type_ is bool else type_(text)
        if type_ is float and not math.isfinite(value):
            raise ValueError
    except (KeyError, ValueError):
        accepted = {bool: "0, 1, true or false", int: "an integer", float: "a number"}[type_]
        raise ConfigError(f"{name}={raw!r}: expected {accepted}") from None
    at_least, at_most = metadata["at_least"], metadata["at_most"]
    if at_most is None and type_ is int:
        at_most = LARGEST
    if at_least is not None and value < at_least:
        raise ConfigError(f"{name}={raw!r}: expected at least {at_least}")
    if at_most is not None and value > at_most:
        raise ConfigError(f"{name}={raw!r}: expected at most {at_most}")
    return value
