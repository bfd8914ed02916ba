"""Threads that prepare what later steps need, while other steps run."""

import time
from collections.abc import Callable

from vllm.ops.cpu.threads import compute_alone
from vllm.utils.background_work import start_in_time_slices

_STILL_BUSY_S = 0.25
"""So long after a step has begun, the next one is expected, or it runs."""


class StepClock:
    """Knows whether steps run. For a thread that notes them and others that ask."""

    def __init__(self) -> None:
        self._began = -_STILL_BUSY_S

    def note(self) -> None:
        """Note that a step begins."""
        self._began = time.monotonic()

    def is_busy(self) -> bool:
        """Whether steps run."""
        return time.monotonic() - self._began < _STILL_BUSY_S


def run_in_background(work: Callable[[], None]) -> None:
    """Run work in a thread that takes one core and no long turns of the interpreter: a step asks
    for the interpreter several times, and waits for up to a turn each time."""

    def run() -> None:
        compute_alone()
        work()

    start_in_time_slices(run, "adapter")
