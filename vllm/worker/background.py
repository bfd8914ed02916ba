"""Threads that prepare what later steps need, while other steps run."""

import sys
import threading
import time
from collections.abc import Callable

from vllm.ops.cpu.threads import compute_alone

_SHORT_TURN_S = 0.0005
"""Longest time for which code in Python keeps the interpreter while another thread wants it."""
_STILL_BUSY_S = 0.25
"""So long after a step has begun, the next one is expected, or it runs."""


class StepClock:
    """Knows whether steps run. For a thread that notes them and others that ask."""

    def __init__(self) -> None:
        self._began = -_STILL_BUSY_S

    def note(self) -> None:
        """A step begins."""
        self._began = time.monotonic()

    def is_busy(self) -> bool:
        """Whether steps run."""
        return time.monotonic() - self._began < _STILL_BUSY_S


class _ShortTurns:
    """While at least one thread has entered it, turns of the interpreter are short."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._usual_s = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_inside:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual_s, _SHORT_TURN_S))
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                sys.setswitchinterval(self._usual_s)


_short_turns = _ShortTurns()


def run_in_background(work: Callable[[], None]) -> None:
    """Run work in a thread that takes one core and no long turns of the interpreter: a step asks
    for the interpreter several times, and waits for up to a turn each time."""

    def run() -> None:
        compute_alone()
        with _short_turns:
            work()

    threading.Thread(target=run, name="adapter", daemon=True).start()
