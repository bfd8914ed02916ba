"""Treat methods as data: list the methods of a protocol, and make methods that forward calls."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

_Self = TypeVar("_Self")
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def methods_of(protocol: type) -> frozenset[str]:
    """Return the names of the public methods that a protocol declares or inherits."""
    return frozenset(
        name
        for cls in protocol.__mro__
        for name, value in vars(cls).items()
        if callable(value) and not name.startswith("_")
    )


def passed_on(
    method: Callable[Concatenate[Any, _Args], _Result], target: Callable[[_Self], Any]
) -> Callable[Concatenate[_Self, _Args], _Result]:
    """Return a method that forwards its call to the method with the same name of another object. It
    has the same signature and docstring.

    Args:
        method: method of the other object's class or protocol.
        target: returns the other object.
    """

    @wraps(method)
    def call(self: _Self, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        return getattr(target(self), method.__name__)(*args, **kwargs)

    return call
