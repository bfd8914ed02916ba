"""Work in the background that leaves the processor and the interpreter to steps."""

import time
from collections.abc import Callable

Rest = Callable[[], None]
"""Called by the work between two pieces of it, each of a fraction of a millisecond."""

_TURN_S = 0.0005
"""Processor time without a rest."""
_SHARE = 12
"""While steps run, a rest takes so many times as long as the work before it."""
_LONGEST_REST_S = 0.02


class Pace:
    """How fast one thread works in the background: as fast as it can, or in short turns while
    others must not wait.

    Made and used in that thread.

    Args:
        is_busy: whether others must not wait. Called in that thread.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        self._start = time.thread_time()

    def rest(self) -> None:
        """See `Rest`."""
        worked = time.thread_time() - self._start
        if worked < _TURN_S:
            return
        if self._is_busy():
            time.sleep(min(_SHARE * worked, _LONGEST_REST_S))
        self._start = time.thread_time()


def no_rest() -> None:
    """The `Rest` of work that nobody has to wait for."""
