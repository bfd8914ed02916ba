"""Checks of config.json and of processor settings, and the errors about them."""

from collections.abc import Mapping
from typing import Any, TypeGuard

from vllm.errors import ConfigError

SETTINGS_FILE = "preprocessor_config.json or processor_config.json"
"""The file with the settings of an image processor or feature extractor; the second has them under
`image_processor` or `feature_extractor`."""


_MAX_LAYERS = 1024


def wrong_config(key: str, value: Any, accepted: str) -> ConfigError:
    """Create the error about a value in config.json.

    Args:
        key: path of the setting, such as `vision_config.hidden_size`.
        value: the wrong value.
        accepted: description of accepted values.
    """
    return ConfigError(f"config.json: {key} is {value!r}; it must be {accepted}")


class SettingsError(ConfigError):
    """A setting of an image processor or feature extractor cannot be used."""


def wrong_setting(key: str, value: Any, accepted: str) -> SettingsError:
    """Create the error about a setting of an image processor or feature extractor.

    Args:
        key: name of the setting.
        value: the wrong value.
        accepted: description of accepted values.
    """
    return SettingsError(f"{SETTINGS_FILE}: {key} is {value!r}; it must be {accepted}")


def is_whole(value: Any, largest: int, smallest: int = 1) -> TypeGuard[int]:
    """Return whether a value of a JSON file is an integer in this range."""
    return type(value) is int and smallest <= value <= largest


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value of a JSON file is a finite number."""
    return type(value) in (int, float) and abs(value) < 1e30


def config_object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return an object in config.json; {} if it is missing or null.

    Raises:
        ConfigError: it is not an object.
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
    """Return a positive integer from config.json.

    Args:
        config: has the key.
        key: name of the setting.
        default: used if it is missing or null.
        largest: largest accepted value.
        within: path of `config` in config.json, with a dot at the end.

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
    """Return a boolean from config.json; for the arguments see `config_whole`.

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
    """Return a positive number from config.json.

    Args:
        config: has the key.
        key: name of the setting.
        default: used if it is missing or null.
        within: path of `config` in config.json, with a dot at the end.

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
    """Return a list of layer indices from `vision_config`.

    Args:
        vision: `vision_config` of config.json.
        key: name of the list.
        default: used if the list is missing or null.

    Raises:
        ConfigError: it is not a list of layer indices in ascending order.
    """
    given = vision.get(key)
    given = default if given is None else given
    is_list = isinstance(given, (list, tuple)) and all(is_whole(n, _MAX_LAYERS, 0) for n in given)
    if not is_list or sorted(set(given)) != list(given):
        accepted = "a list of indices of layers, in ascending order"
        raise wrong_config(f"vision_config.{key}", given, accepted)
    return tuple(given)
