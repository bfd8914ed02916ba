"""ASGI middleware that the user names with --middleware."""

import inspect
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from fastapi import FastAPI

from vllm.errors import ConfigError


def add_user_middleware(app: FastAPI, names: Iterable[str]) -> None:
    """Put them around the routes; the first name is the outermost.

    A class is ASGI middleware, constructed with the application behind it; a coroutine function
    takes a request and `call_next`. They run behind the API keys.

    Raises:
        ConfigError: a name cannot be imported, or is neither.
    """
    for name in reversed(tuple(names)):
        found = _find(name)
        if inspect.isclass(found):
            app.add_middleware(found)  # type: ignore[arg-type]
        elif inspect.iscoroutinefunction(found):
            app.middleware("http")(found)
        else:
            raise ConfigError(f"middleware {name!r} is neither a class nor a coroutine function")


def _find(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"middleware {name!r} cannot be imported: {error}") from None
