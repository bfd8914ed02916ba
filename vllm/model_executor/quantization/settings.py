"""Reading the `quantization_config` of a checkpoint. Independent of single formats."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from vllm.config.quantization.settings_error import SettingsError, setting
from vllm.model_executor.layers.linear import ParallelLinear

Settings = Mapping[str, Any]

OF_GPU = "a layout for the matrix units of another device"
"""The reason why layouts of Marlin are refused."""
NOT_MARLIN = f"the GPTQ checkpoint that it was made of: Marlin is {OF_GPU}"
"""Advice about a checkpoint in that layout."""

MAX_GROUP = 1 << 16
"""Largest number of inputs or outputs that share a scale."""


def choice(
    settings: Settings, key: str, accepted: Sequence[Any], default: Any = None, within: str = ""
) -> Any:
    """Return which of the accepted values a key has. Texts are compared without regard to case and
    to which of - and _ is between words.

    Args:
        settings: has the key.
        key: its name.
        accepted: values.
        default: where there is no such key, or null where that is not accepted.
        within: where the settings are in quantization_config, with a dot at the end.

    Raises:
        ConfigError: it is another one.
    """
    value = settings.get(key, default)
    if value is None and None not in accepted:
        value = default
    for each in accepted:
        if value is each or (type(value) is type(each) and _folded(value) == _folded(each)):
            return each
    raise wrong(within + key, value, ", ".join(map(str, accepted)))


def _folded(value: Any) -> Any:
    return value.lower().replace("_", "-") if isinstance(value, str) else value


def wrong(key: str, value: Any, accepted: str) -> SettingsError:
    """Make the error about a value of the settings."""
    return SettingsError(f"{setting(key)} is {value!r}; supported: {accepted}")


def read_modelopt_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings of ModelOpt in one object, as config.json has them; hf_quant_config.json
    has them under the key `quantization`."""
    nested = settings.get("quantization")
    return {**settings, **nested} if isinstance(nested, dict) else dict(settings)


def group_size_of(settings: Settings, key: str) -> int:
    """Return how many inputs share a scale; -1, which an absent key and null mean as well: all.

    Raises:
        ConfigError: it is neither -1 nor a positive number.
    """
    size = settings.get(key)
    size = -1 if size is None else size
    if type(size) is not int or (size != -1 and not 0 < size <= MAX_GROUP):
        raise wrong(key, size, f"-1, or a number from 1 to {MAX_GROUP}")
    return size


def names(settings: Settings, *keys: str) -> list[str]:
    """Return the module names in the lists under the keys that exist.

    Raises:
        ConfigError: one is no list of strings.
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
    """Whether a module, or one that it is in, is among the entries.

    Args:
        names: all names of the module.
        entries: names, or ends of names, or patterns with asterisks for whole names.
    """
    return any(_matches(name, entry) for name in names for entry in entries)


def _matches(name: str, entry: str) -> bool:
    if "*" in entry:
        return fnmatchcase(name, entry)
    return f".{entry}." in f".{name}."
