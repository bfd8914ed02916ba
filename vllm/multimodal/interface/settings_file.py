"""Finds the files with the settings of image processors and feature extractors."""

from pathlib import Path
from typing import Any

from vllm.errors import ConfigError
from vllm.utils.files.json_file import read_json_object

WHOLE_FILE, OWN_FILE = "processor_config.json", "preprocessor_config.json"


def find_settings(folder: Path, part: str) -> dict[str, Any] | None:
    """Return the settings of one part of a processor; None if the folder has none.

    Args:
        folder: folder of the model.
        part: key in `processor_config.json`, such as `image_processor`. If it is missing, the
            settings are in `preprocessor_config.json`.

    Raises:
        ConfigError: a file is damaged.
    """
    found = None
    whole, own = folder / WHOLE_FILE, folder / OWN_FILE
    if whole.exists():
        found = read_json_object(whole).get(part)
        if found is not None and not isinstance(found, dict):
            raise ConfigError(f"{whole}: {part} is {found!r}; it must be an object")
    if found is None and own.exists():
        found = read_json_object(own)
    return found
