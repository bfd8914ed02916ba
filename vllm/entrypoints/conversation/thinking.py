"""Convert the thinking switches of requests to arguments of chat templates.

Requests of all APIs, and `LLM.chat`, end up with arguments of the chat template. Each model family
has its own name for the switch, which a client cannot know. So any given switch sets all of them
when the template is rendered. A template ignores names that it does not know.
"""

from collections.abc import Mapping
from typing import Any

_SWITCHES: Mapping[str, Mapping[bool, object]] = {
    "enable_thinking": {True: True, False: False},  # Qwen, GLM, Hunyuan, ERNIE
    "thinking": {True: True, False: False},  # DeepSeek, Granite, Kimi, Holo
    "thinking_budget": {False: 0},  # Seed-OSS: a number of tokens; without it there is no limit
}
"""Argument of a template -> its value for a model that thinks (True) and one that does not (False).
A value that is missing leaves the argument out."""

_EFFORT = "reasoning_effort"
_NO_EFFORT = "none"


def with_all_switches(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template arguments with all thinking switches, if one of them is given.

    `reasoning_effort` "none" also counts as a switch; with other efforts the template decides
    whether the model thinks.
    """
    is_on = switch_of(kwargs)
    if is_on is None:
        return dict(kwargs)
    switches = {name: values[is_on] for name, values in _SWITCHES.items() if is_on in values}
    return {**switches, **kwargs}


def merge_switches(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template arguments for a request. They take precedence over the server's defaults.

    A switch of the request replaces the server's switches under all names.
    """
    replaced = {*given, *(_SWITCHES if switch_of(given) is not None else ())}
    kept = {name: value for name, value in defaults.items() if name not in replaced}
    return {**kept, **given}


def switch_of(kwargs: Mapping[str, Any]) -> bool | None:
    """Return whether the template arguments turn thinking on or off; None if they do neither."""
    for name, values in _SWITCHES.items():
        value = kwargs.get(name)
        if value is not None and (True in values or value == values[False]):
            return bool(value)
    return False if kwargs.get(_EFFORT) == _NO_EFFORT else None
