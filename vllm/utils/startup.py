"""How far the start of an engine is: told where the work is done, heard by whoever shows it.

One listener per process. Without one, nothing happens.
"""

from collections.abc import Callable

Listener = Callable[[str, int, int], None]

_listener: Listener | None = None


def listen(listener: Listener | None) -> None:
    """Call `listener(phase, done, total)` from now on; None stops."""
    global _listener
    _listener = listener


def report(phase: str, done: int = 0, total: int = 0) -> None:
    """Work of a phase has come to `done` of `total`; a total of 0 is not known."""
    if _listener is not None:
        _listener(phase, done, total)
