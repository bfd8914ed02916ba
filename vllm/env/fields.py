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
    other_words: Mapping[str, str] | None = None,
) -> Any:
    """Declare one variable. A default of None means "not set", and so does an empty value unless it
    `may_be_empty`. `means_true` has more values that turn a switch on, and `other_words` more
    words for one of the choices."""
    metadata = {
        "help": help,
        "choices": choices,
        "at_least": at_least,
        "at_most": at_most,
        "section": section,
        "may_be_empty": may_be_empty,
        "means_true": means_true,
        "other_words": other_words or {},
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
        asked = metadata["other_words"].get(text.upper(), text)
        for choice in choices:
            if asked.lower() == choice.lower():
                return choice
        raise _refusal(name, raw, f"one of {', '.join(choices)}")
    if type_ is str:
        return raw  # not stripped: a prefix may end with a space
    at_least, at_most = metadata["at_least"], metadata["at_most"]
    accepted = _accepted(type_, at_least, at_most)
    try:
        words = {**WORDS, **dict.fromkeys(metadata["means_true"], True)}
        value = words[text.lower()] if type_ is bool else type_(text)
        if type_ is float and not math.isfinite(value):
            raise ValueError
    except (KeyError, ValueError):
        raise _refusal(name, raw, accepted, is_fraction=at_most == 1) from None
    if type_ is int and at_most is None and value > LARGEST:
        raise _refusal(name, raw, _accepted(type_, at_least, LARGEST))
    if (at_least is not None and value < at_least) or (at_most is not None and value > at_most):
        raise _refusal(name, raw, accepted, is_fraction=at_most == 1)
    return value


def _accepted(type_: type, at_least: float | None, at_most: float | None) -> str:
    """Describe the accepted values of a variable that is not text."""
    if type_ is bool:
        return "0, 1, true or false"
    noun = "an integer" if type_ is int else "a number"
    if at_least is not None and at_most is not None:
        return f"{noun} from {at_least} to {at_most}"
    if at_least is not None:
        return f"{noun} of at least {at_least}"
    return noun if at_most is None else f"{noun} of at most {at_most}"


def _refusal(name: str, raw: str, accepted: str, *, is_fraction: bool = False) -> ConfigError:
    """Return the error of a wrong value, with advice about how such a value often arises."""
    text = raw.strip()
    advice = ""
    if text[:1] in ("'", '"') or text[-1:] in ("'", '"'):
        advice = ". Remove the quotation marks: a file for `docker run --env-file` needs none"
    elif "#" in text:
        advice = ". Remove the comment: it is a part of the value"
    elif is_fraction and (share := _share(text)) is not None:
        advice = f". It is a fraction: write {share:g} % as {share / 100:g}"
    return ConfigError(f"{name}={raw!r}: expected {accepted}{advice}")


def _share(text: str) -> float | None:
    """Return the number of a percentage above 1 and up to 100, with or without its sign; None if it
    is none."""
    try:
        share = float(text.removesuffix("%"))
    except ValueError:
        return None
    return share if 1 < share <= 100 else None
