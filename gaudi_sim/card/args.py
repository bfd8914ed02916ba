"""Read and replace the leaves of an operator's arguments, in lists, tuples and dicts.

`torch.utils._pytree` supports any container, but takes longer than a small operator.
"""

from collections.abc import Callable
from typing import Any


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the same structure with `function` applied to each leaf."""
    if isinstance(value, tuple):
        return tuple([map_leaves(function, x) for x in value])
    if isinstance(value, list):
        return [map_leaves(function, x) for x in value]
    if isinstance(value, dict):
        return {name: map_leaves(function, x) for name, x in value.items()}
    return function(value)


def leaves_of(*values: Any) -> list[Any]:
    """Return every leaf, in order."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, tuple | list):
            found += leaves_of(*value)
        elif isinstance(value, dict):
            found += leaves_of(*value.values())
        else:
            found.append(value)
    return found
