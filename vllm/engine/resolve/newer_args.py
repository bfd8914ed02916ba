"""Translate arguments of newer releases of vLLM to the arguments of this engine.

Model cards name them, such as `--structured-outputs-config.backend xgrammar`.
"""

import json
from collections.abc import Mapping
from typing import Any

from vllm.errors import ConfigError
from vllm.inputs import MODALITIES

RENAMED: Mapping[str, str] = {
    "kv_cache_memory": "kv_cache_memory_bytes",
    "pooler_config": "override_pooler_config",
}
"""Newer or older name -> name here."""

OBJECTS: Mapping[str, Mapping[str, str]] = {
    "structured_outputs_config": {
        "backend": "guided_decoding_backend",
        "disable_fallback": "guided_decoding_disable_fallback",
        "disable_any_whitespace": "guided_decoding_disable_any_whitespace",
        "disable_additional_properties": "guided_decoding_disable_additional_properties",
        "reasoning_parser": "reasoning_parser",
    }
}
"""Argument with an object -> its keys, and the argument that each of them is here."""

TEXT_ONLY = "language_model_only"
"""Switch that refuses images, sounds and videos in requests."""

_ALWAYS_OFF = {
    "enable_in_reasoning": "thoughts are never constrained, only the answer after them",
    "reasoning_parser_plugin": "--reasoning-parser-plugin has the file",
}
"""Keys of objects that may only be false or empty, and why."""


def is_newer(name: str) -> bool:
    """Return whether an argument is one that `with_own_names` translates."""
    return name in RENAMED or name in OBJECTS or name == TEXT_ONLY


def with_own_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an engine under the names that they have here.

    They count more than the argument under its own name, which may have its default.

    Args:
        settings: arguments by name; None: not given.

    Raises:
        ConfigError: an object has a key that is not known.
    """
    found = {name: value for name, value in settings.items() if not is_newer(name)}
    for name, value in settings.items():
        if value is None or not is_newer(name):
            continue
        if name in RENAMED:
            given = {RENAMED[name]: value}
        elif name in OBJECTS:
            given = _of_object(name, value)
        else:
            given = {"limit_mm_per_prompt": dict.fromkeys(MODALITIES, 0)} if value else {}
        found |= given
    return found


def _of_object(name: str, value: Any) -> dict[str, Any]:
    names = OBJECTS[name]
    given = _read(value) if isinstance(value, str) else value
    if not isinstance(given, Mapping):
        given = getattr(given, "__dict__", None)
    if given is None:
        raise ConfigError(f"{name} must be a JSON object (a dict), got {value!r}")
    for key, each in given.items():
        if key in _ALWAYS_OFF and each:
            raise ConfigError(
                f"{name}: {key!r} must be false or empty, got {each!r}: {_ALWAYS_OFF[key]}. Leave "
                "it out"
            )
        if key not in names and key not in _ALWAYS_OFF:
            raise ConfigError(
                f"{name} has the key {key!r}; accepted are {', '.join(names)}. Leave it out"
            )
    return {names[key]: each for key, each in given.items() if key in names and each is not None}


def _read(text: str) -> Any:
    """Return the value of a JSON text; None if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None
