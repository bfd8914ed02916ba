"""Classes named by strings, so that naming one does not import it."""

from importlib import import_module
from typing import Any


def load_class(name: str) -> Any:
    """The class that "module:Class" names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
