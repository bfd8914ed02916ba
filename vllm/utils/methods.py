"""Methods as data: the names that a protocol declares, and methods that pass a call on."""

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
    """Make a method that calls the one of the same name of another object. It has the signature and
    the docstring of that one.

    Args:
        method: of the class, or a protocol, of the other object.
        target: returns the other object.
    """

    @wraps(method)
    def call(self: _Self, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        result: _Result = getattr(target(self), method.__name__)(*args, **kwargs)
        return result

    return call
