"""Define errors about the quantization settings of a checkpoint, which name the settings' file.

Settings are in config.json, or in a separate file. The code that reads them gets only their values,
so it raises errors without the name of the file; `naming_settings_file` adds the name.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm.errors import ConfigError, WeightLoadError

SETTINGS_FILES = "quantization_settings_files"
"""Key of a config for the location of its settings: first part of a setting's name ("": all others)
-> [key of the object that contains the setting ("": the whole file), name of the file]. Absent: all
settings are in `quantization_config` of config.json."""
_USUAL = ("quantization_config", "config.json")
_MARK = "\0"  # in no text of a file that a message shows


def setting(key: str = "") -> str:
    """Return a placeholder for the full name of a setting, to use in the message of an error.

    Args:
        key: name of the setting; "": all settings together.
    """
    return f"{_MARK}{key}{_MARK}"


class SettingsError(ConfigError):
    """A setting is wrong. The message has one placeholder from `setting`; the name of the file is
    added in front."""

    files: Mapping[str, Any] = {}
    """Location of the settings, in the format of `SETTINGS_FILES`."""

    def __str__(self) -> str:
        before, path, file, after = self._parts()
        return f"{file} of the checkpoint: {before}{path or 'it'}{after}"

    def _parts(self) -> tuple[str, str, str, str]:
        before, key, after = str(self.args[0]).split(_MARK)
        name, file = self.files.get(key.partition(".")[0]) or self.files.get("") or _USUAL
        return before, ".".join(part for part in (name, key) if part), file, after


class SettingsMismatch(SettingsError, WeightLoadError):
    """A tensor of a checkpoint does not fit its settings. The message is about the tensor."""

    def __str__(self) -> str:
        before, path, file, after = self._parts()
        return f"{before}{f'{path} in {file}' if path else file}{after}"


@contextmanager
def naming_settings_file(config: Mapping[str, Any]) -> Iterator[None]:
    """Add the name of the file to errors about settings that are raised in this context.

    Args:
        config: config of the checkpoint.
    """
    try:
        yield
    except SettingsError as error:
        error.files = config.get(SETTINGS_FILES) or {}
        raise
