"""Errors about the quantization settings of a checkpoint, which name the file that has them.

Settings are in config.json, or in a file of their own. What reads them gets the values only, so an
error is raised without the file, and gets it from `naming_settings_file`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm.errors import ConfigError, WeightLoadError

SETTINGS_FILES = "quantization_settings_files"
"""Key of a config: first part of a setting's name, "" for all others -> where it is: [the object
that has it, "" for the whole file; the file]. Absent: all settings are where they usually are."""
_USUAL = ("quantization_config", "config.json")
_MARK = "\0"  # in no text of a file that a message shows


def setting(key: str = "") -> str:
    """Return what stands for the full name of a setting in the message of an error.

    Args:
        key: the name; "": all settings together.
    """
    return f"{_MARK}{key}{_MARK}"


class SettingsError(ConfigError):
    """A setting is wrong. The message has one name of a setting, which is made by `setting`, and
    begins with its file."""

    files: Mapping[str, Any] = {}
    """As `SETTINGS_FILES` has them."""

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
    """Let errors about settings that are raised within name the file.

    Args:
        config: config of the checkpoint.
    """
    try:
        yield
    except SettingsError as error:
        error.files = config.get(SETTINGS_FILES) or {}
        raise
