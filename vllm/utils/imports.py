"""Import classes and functions by name when they are needed, and large libraries without garbage
collection or without torch.
"""

import gc
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from vllm.errors import ConfigError

IMPORT_LOCK = threading.RLock()
"""Held by a thread that imports in the background, and by one that imports what a user names. Large
libraries such as transformers fail when two threads import them at the same time."""


@contextmanager
def without_collections() -> Iterator[None]:
    """Pause garbage collection during the imports of large libraries.

    Imported objects are not freed, but each collection would visit them again, which takes 8 to 16
    % of the time from the start of a program to its first token. Several threads may be inside at
    the same time; collection continues when the thread that entered first leaves.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_leaves_torch_out = False


def leave_torch_out() -> None:
    """Let `without_torch` have an effect in this process, which must not use transformers with
    torch later.
    """
    global _leaves_torch_out
    _leaves_torch_out = True


@contextmanager
def without_torch() -> Iterator[None]:
    """Hide torch from transformers, which otherwise imports it: this takes seconds and 400 MB.

    transformers notes at its first import that there is no torch, so the process never imports
    torch for it later. Does nothing unless `leave_torch_out` was called, and if torch is imported
    already.
    """
    if not _leaves_torch_out or "torch" in sys.modules:
        yield
        return
    with IMPORT_LOCK:
        hide_torch()
        try:
            yield
        finally:
            show_torch()


def hide_torch() -> None:
    """Let imports of torch fail in this process until `show_torch`; it must not be imported."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    logging.getLogger("transformers").addFilter(_no_advice)


def show_torch() -> None:
    """Let imports of torch succeed again."""
    if sys.modules.get("torch") is None:
        sys.modules.pop("torch", None)
    logging.getLogger("transformers").removeFilter(_no_advice)


def _no_advice(record: logging.LogRecord) -> bool:
    """Drop the warning of transformers that torch is missing."""
    return "PyTorch" not in record.getMessage()


def load_class(name: str) -> Any:
    """Return the class that "module:Class" names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def load_name(name: str) -> Any:
    """Return the object that "package.module.name" names. Errors of the import are passed on."""
    module, _, attribute = name.rpartition(".")
    with IMPORT_LOCK:
        return getattr(import_module(module), attribute)


def load_user_class(setting: str, name: str) -> type:
    """Return the class that a user names as "package.module.Class" or "package.module:Class".

    Args:
        setting: setting that contains the name, for the error message.
        name: name of the class.

    Raises:
        ConfigError: it cannot be imported, or is not a class.
    """
    try:
        found = load_name(name.replace(":", "."))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{setting}={name!r} cannot be imported ({error}). Give a class as "
            f"package.module.Class, from a package that is installed or is in the folder where "
            f"the program was started"
        ) from None
    if not isinstance(found, type):
        raise ConfigError(
            f"{setting}={name!r} must name a class, but it is a {type(found).__name__}"
        )
    return found
