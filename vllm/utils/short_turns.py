"""Short turns of the interpreter, for work in the background that is code in Python."""

import sys
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TURN_S = 0.0005
"""Longest time for which code in Python keeps the interpreter while another thread wants it."""


class _ShortTurns:
    """While at least one thread has entered it, turns of the interpreter are short.

    A thread that releases the interpreter, as each call of a kernel does, waits for a turn of
    another thread before it goes on. With the turns of 5 ms that Python has, a step of a hundred
    calls takes half a second beside a thread that imports modules.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._usual_s = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_inside:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual_s, TURN_S))
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                sys.setswitchinterval(self._usual_s)


_short_turns = _ShortTurns()


def in_short_turns(work: Callable[[], T]) -> T:
    """The result of `work`, which runs in a thread for which no other thread should wait."""
    with _short_turns:
        return work()


def start_in_short_turns(work: Callable[[], None], name: str) -> None:
    """Run `work` in a thread of this name, in short turns."""
    threading.Thread(target=in_short_turns, args=(work,), name=name, daemon=True).start()
