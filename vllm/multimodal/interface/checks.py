"""Checks of config.json and of the settings of processors, and the errors about them."""

from collections.abc import Mapping
from typing import Any, TypeGuard

from vllm.errors import ConfigError

SETTINGS_FILE = "preprocessor_config.json or processor_config.json"
"""The file with the settings of an image processor or feature extractor; the second has them under
`image_processor` or `feature_extractor`."""


_MAX_LAYERS = 1024


def wrong_config(key: str, value: Any, accepted: str) -> ConfigError:
    """Return the error about a value in config.json.

    Args:
        key: with the keys of the objects around it, such as `vision_config.hidden_size`.
        value: that it has.
        accepted: what it may be.
    """
    return ConfigError(f"config.json: {key} is {value!r}; it must be {accepted}")


class SettingsError(ConfigError):
    """A setting of an image processor or feature extractor cannot be used."""


def wrong_setting(key: str, value: Any, accepted: str) -> SettingsError:
    """Return the error about a setting of an image processor or feature extractor.

    Args:
        key: its name.
        value: that it has.
        accepted: what it may be.
    """
    return SettingsError(f"{SETTINGS_FILE}: {key} is {value!r}; it must be {accepted}")


def is_whole(value: Any, largest: int, smallest: int = 1) -> TypeGuard[int]:
    """Return whether a value of a JSON file is an integer in this range."""
    return type(value) is int and smallest <= value <= largest


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value of a JSON file is a finite number."""
    return type(value) in (int, float) and abs(value) < 1e30


def config_object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return an object within config.json; {} if it is absent or null.

    Raises:
        ConfigError: it is no object.
    """
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong_config(key, value, "an object")
    return value


def config_whole(
    config: Mapping[str, Any], key: str, default: int, largest: int, within: str = ""
) -> int:
    """Return a positive integer of config.json.

    Args:
        config: has the key.
        key: its name.
        default: where it is absent or null.
        largest: that is accepted.
        within: keys of the objects around it, with a dot at the end.

    Raises:
        ConfigError: it is another value.
    """
    value = config.get(key)
    if value is None:
        return default
    if not is_whole(value, largest):
        raise wrong_config(within + key, value, f"an integer from 1 to {largest}")
    return value


def config_bool(config: Mapping[str, Any], key: str, default: bool, within: str = "") -> bool:
    """Return a boolean of config.json; it has the arguments of `config_whole`.

    Raises:
        ConfigError: it is another value.
    """
    value = config.get(key)
    if value is None:
        return default
    if type(value) is not bool:
        raise wrong_config(within + key, value, "true or false")
    return value


def config_number(config: Mapping[str, Any], key: str, default: float, within: str = "") -> float:
    """Return a positive number of config.json.

    Args:
        config: has the key.
        key: its name.
        default: where it is absent or null.
        within: keys of the objects around it, with a dot at the end.

    Raises:
        ConfigError: it is another value.
    """
    value = config.get(key)
    if value is None:
        return default
    if not is_number(value) or value <= 0:
        raise wrong_config(within + key, value, "a positive number")
    return float(value)


def layer_indices(vision: Mapping[str, Any], key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """Return the indices of some layers.

    Args:
        vision: `vision_config` of config.json.
        key: with the list.
        default: where the list is absent or null.

    Raises:
        ConfigError: it is no list of indices of layers, in ascending order.
    """
    given = vision.get(key)
    given = default if given is None else given
    is_list = isinstance(given, (list, tuple)) and all(is_whole(n, _MAX_LAYERS, 0) for n in given)
    if not is_list or sorted(set(given)) != list(given):
        accepted = "a list of indices of layers, in ascending order"
        raise wrong_config(f"vision_config.{key}", given, accepted)
    return tuple(given)
