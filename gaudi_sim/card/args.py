"""Read and replace the leaves of an operator's arguments, in lists, tuples and dicts.

`torch.utils._pytree` supports any container, but takes longer than a small operator.
"""

from collections.abc import Callable, Iterable
from typing import Any

_SEQUENCES = (tuple, list)


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
    _add_leaves(values, found)
    return found


def _add_leaves(values: Iterable[Any], found: list[Any]) -> None:
    for value in values:
        if isinstance(value, _SEQUENCES):
            _add_leaves(value, found)
        elif isinstance(value, dict):
            _add_leaves(value.values(), found)
        else:
            found.append(value)
