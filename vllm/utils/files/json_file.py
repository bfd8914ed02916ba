"""Read the JSON files of a model folder."""

import json
from pathlib import Path
from typing import Any

from vllm.errors import ConfigError
from vllm.utils.files.lfs import pointer_problem


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ConfigError: the file cannot be read, is not JSON, or contains another type.
    """
    return _read(path, dict, "an object")


def read_json_array(path: Path) -> list[Any]:
    """Return the array in a JSON file.

    Raises:
        ConfigError: the file cannot be read, is not JSON, or contains another type.
    """
    return _read(path, list, "an array")


def as_integer(value: Any) -> Any:
    """Return an integer that was written as 8.0; anything else unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _read(path: Path, kind: type, kind_name: str) -> Any:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        if problem := pointer_problem(path):
            raise ConfigError(problem) from None
        raise ConfigError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is not valid JSON: it is nested too deeply") from None
    except ValueError as error:  # an integer with thousands of digits
        raise ConfigError(f"{path} has a number that is too long: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if not isinstance(value, kind):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}, not {kind_name}")
    return value
