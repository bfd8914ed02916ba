"""Reads the `quantization_config` of a checkpoint. Independent of single formats."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from vllm.config.quantization.settings_error import SettingsError, setting
from vllm.model_executor.layers.linear import ParallelLinear

Settings = Mapping[str, Any]

OF_GPU = "a layout for the matrix units of another device"
"""The reason why layouts of Marlin are refused."""
NOT_MARLIN = f"the GPTQ checkpoint from which it was made: Marlin is {OF_GPU}"
"""Advice about a checkpoint in that layout."""

MAX_GROUP = 1 << 16
"""Largest number of inputs or outputs that share a scale."""


def choice(
    settings: Settings, key: str, accepted: Sequence[Any], default: Any = None, within: str = ""
) -> Any:
    """Return the value of a setting, which must be one of the accepted values.

    Strings are compared ignoring case and the difference between - and _. An integer or a switch
    may be written as a text.

    Args:
        settings: has the key.
        key: name of the setting.
        accepted: values.
        default: used if the key is missing, or is null and null is not accepted.
        within: path of the settings in quantization_config, with a dot at the end.

    Raises:
        ConfigError: the value is not accepted.
    """
    value = settings.get(key, default)
    if value is None and None not in accepted:
        value = default
    read = value if any(isinstance(each, str) for each in accepted) else plain_value(value)
    for each in accepted:
        if read is each or (type(read) is type(each) and _folded(read) == _folded(each)):
            return each
    raise wrong(within + key, value, ", ".join(map(str, accepted)))


def plain_value(value: Any) -> Any:
    """Return an integer or a switch that a program wrote as a text or as a float; anything else
    unchanged.

    >>> plain_value("128"), plain_value("-1"), plain_value(4.0), plain_value("True")
    (128, -1, 4, True)
    """
    if isinstance(value, str):
        text = value.strip().lower()
        if text.removeprefix("-").isdecimal():
            return int(text)
        return {"true": True, "false": False}.get(text, value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _folded(value: Any) -> Any:
    return value.lower().replace("_", "-") if isinstance(value, str) else value


def wrong(key: str, value: Any, accepted: str) -> SettingsError:
    """Create the error about a value of the quantization settings."""
    return SettingsError(f"{setting(key)} is {value!r}; supported: {accepted}")


def read_modelopt_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings of ModelOpt in one flat object.

    config.json has them flat; hf_quant_config.json has them under the key `quantization`.
    """
    nested = settings.get("quantization")
    return {**settings, **nested} if isinstance(nested, dict) else dict(settings)


def group_size_of(settings: Settings) -> int:
    """Return how many inputs share a scale; -1 for all, also if `group_size` is missing or null.

    Raises:
        ConfigError: it is neither -1 nor a positive integer.
    """
    size = plain_value(settings.get("group_size"))
    size = -1 if size is None else size
    if type(size) is not int or (size != -1 and not 0 < size <= MAX_GROUP):
        raise wrong("group_size", size, f"-1, or a number from 1 to {MAX_GROUP}")
    return size


def names(settings: Settings, *keys: str) -> list[str]:
    """Return all module names in the lists under these keys; missing keys are skipped.

    Raises:
        ConfigError: a value is not a list of strings.
    """
    found: list[str] = []
    for key in keys:
        value = settings.get(key)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise wrong(key, value, "a list of module names")
        found += value
    return found


def part_names(name: str, layer: ParallelLinear) -> list[str]:
    """Return the names of a layer's parts in the checkpoint, such as q_proj, k_proj and v_proj."""
    parent = name.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    return [prefix + part if part else name for part in layer.feature_slices]


def is_listed(names: Iterable[str], entries: Iterable[str]) -> bool:
    """Return whether a module, or a module that contains it, is listed.

    Args:
        names: all names of the module.
        entries: names, ends of names, or patterns with asterisks for whole names.
    """
    return any(_matches(name, entry) for name in names for entry in entries)


def _matches(name: str, entry: str) -> bool:
    if "*" in entry:
        return fnmatchcase(name, entry)
    return f".{entry}." in f".{name}."
