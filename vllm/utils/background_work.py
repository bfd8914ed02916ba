"""Run work in the background without slowing down steps.

Python code in another thread yields the interpreter lock often (`run_in_time_slices`). A thread
that works for a long time also pauses while steps run (`Throttle`).
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TIME_SLICE_S = 0.0005
"""Longest time for which code in Python keeps the interpreter while another thread wants it."""


class _TimeSlices:
    """Shortens the switch interval of the interpreter while at least one thread has entered it.

    Each call of a kernel releases the interpreter, and the thread may then have to wait for one
    switch interval of another thread. With Python's interval of 5 ms, a step with a hundred calls
    takes half a second while another thread imports modules.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._usual_s = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_inside:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual_s, TIME_SLICE_S))
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                sys.setswitchinterval(self._usual_s)


_time_slices = _TimeSlices()


def run_in_time_slices(work: Callable[[], T]) -> T:
    """Run `work` in the current thread and return its result, while other threads get the
    interpreter lock quickly.
    """
    with _time_slices:
        return work()


def start_in_time_slices(work: Callable[[], None], name: str) -> None:
    """Run `work` in a thread of this name, in short time slices.

    If no thread can be started, `work` runs before this function returns. Since Python 3.12, this
    is so after the main thread has ended.
    """
    thread = threading.Thread(target=run_in_time_slices, args=(work,), name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        run_in_time_slices(work)


Pause = Callable[[], None]
"""Called by the work between two pieces of it, each of a fraction of a millisecond."""

_WORK_S = 0.0005
"""Seconds of processor time between two pauses."""
_PAUSE_RATIO = 12
"""While steps run, a pause takes so many times as long as the work before it."""
_MAX_PAUSE_S = 0.02


class Throttle:
    """Slows down a background thread while other threads must not wait for it.

    Create and use it in the background thread.

    Args:
        is_busy: returns whether other threads must not wait. Called in the background thread.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        self._start = time.thread_time()

    def pause(self) -> None:
        """Pause after some work, so that other threads can run."""
        worked = time.thread_time() - self._start
        if worked < _WORK_S:
            return
        if self._is_busy():
            time.sleep(min(_PAUSE_RATIO * worked, _MAX_PAUSE_S))
        self._start = time.thread_time()


def no_pause() -> None:
    """Do nothing; used instead of `Throttle.pause` if no other thread has to wait."""
