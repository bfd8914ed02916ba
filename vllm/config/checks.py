"""Checks shared by the config classes; each failure names field, value and accepted values."""

from typing import Any

from vllm.errors import ConfigError


def check_at_least(config: object, smallest: int, *names: str) -> None:
    """Each named integer field is an int of at least `smallest`."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
            raise ConfigError(f"{name} must be an integer of at least {smallest}, got {value!r}")


def check_one_of(config: object, name: str, choices: tuple[Any, ...]) -> None:
    """The named field holds one of `choices`."""
    value = getattr(config, name)
    if value not in choices:
        accepted = ", ".join(str(choice) for choice in choices)
        raise ConfigError(f"{name} must be one of {accepted}, got {value!r}")
