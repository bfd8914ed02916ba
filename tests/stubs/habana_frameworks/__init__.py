"""A stand-in for the vendor package: documented names and signatures only, which it records.

Every call goes into `calls` as (dotted name below this package, number of positional arguments,
names of keywords) and is answered by the simulated card. A name or an argument that is not here
fails as it would with the real package. The names are those that builds 1.19 and later share.

A call that torch.compile captures is recorded once, while it is captured: a compiled graph calls
no Python of the package, and must not be compiled again for a list that has grown.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

calls: list[tuple[str, int, tuple[str, ...]]] = []


def documented(function: Callable[..., Any]) -> Callable[..., Any]:
    """Record the calls of `function`; Python checks the arguments."""
    module = function.__module__.removeprefix("habana_frameworks.")
    name = f"{module}.{function.__qualname__}"

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        _record(name, len(args), *kwargs)
        return result

    return recorded


@torch._dynamo.assume_constant_result
def _record(name: str, num_positional: int, *keywords: str) -> None:
    calls.append((name, num_positional, keywords))
