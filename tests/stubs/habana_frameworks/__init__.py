"""A stand-in for the vendor package, for contract tests: documented names and signatures only.

Every call is recorded in `calls` as (dotted name below this package, number of positional
arguments, names of keywords). A name that is not here fails as it would with the real package.
"""

import functools
from collections.abc import Callable
from typing import Any

calls: list[tuple[str, int, tuple[str, ...]]] = []


def documented(function: Callable[..., Any]) -> Callable[..., Any]:
    """Record the calls of `function`; Python checks the arguments."""
    module = function.__module__.removeprefix("habana_frameworks.")
    name = f"{module}.{function.__qualname__}"

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        calls.append((name, len(args), tuple(kwargs)))
        return function(*args, **kwargs)

    return recorded
