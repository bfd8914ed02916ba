"""Load the ASGI middleware that the user names with --middleware."""

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.errors import ConfigError
from vllm.utils.imports import load_name

if TYPE_CHECKING:
    from fastapi import FastAPI


def add_user_middleware(app: "FastAPI", names: Iterable[str]) -> None:
    """Add user middleware around the routes; the first name is the outermost.

    A class is ASGI middleware, constructed with the inner application; a coroutine function gets a
    request and `call_next`. They run after the check of API keys.

    Raises:
        ConfigError: a name cannot be imported, or is neither a class nor a coroutine function.
    """
    for name in reversed(tuple(names)):
        found = find_middleware(name)
        if inspect.isclass(found):
            app.add_middleware(found)  # type: ignore[arg-type]
        else:
            app.middleware("http")(found)


def find_middleware(name: str) -> Any:
    """Import the class or coroutine function of this name. Runs its module.

    Raises:
        ConfigError: it cannot be imported, or is neither a class nor a coroutine function.
    """
    try:
        found = load_name(name)
    except Exception as error:  # code of a user may raise anything
        raise ConfigError(
            f"middleware={name!r} cannot be imported: {type(error).__name__}: {error}. Give it as "
            "module.name, with the module on Python's path."
        ) from error
    if not inspect.isclass(found) and not inspect.iscoroutinefunction(found):
        raise ConfigError(f"middleware={name!r} is neither a class nor a coroutine function")
    return found
