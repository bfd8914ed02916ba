"""Background threads that prepare data of later steps while other steps run."""

import time
from collections.abc import Callable

from vllm.ops.cpu.threads import compute_alone
from vllm.utils.background_work import start_in_time_slices

_STILL_BUSY_S = 0.25
"""So long after a step has begun, the next one is expected, or it runs."""


class StepClock:
    """Knows whether steps are running. One thread notes them, others may ask."""

    def __init__(self) -> None:
        self._began = -_STILL_BUSY_S

    def note(self) -> None:
        """Note that a step begins."""
        self._began = time.monotonic()

    def is_busy(self) -> bool:
        """Return whether a step has begun within the last moments, so that steps probably run."""
        return time.monotonic() - self._began < _STILL_BUSY_S


def run_in_background(work: Callable[[], None]) -> None:
    """Run work in a thread that takes one core and holds the interpreter lock only briefly.

    A step needs the interpreter lock several times, and waits for it each time.
    """

    def run() -> None:
        compute_alone()
        work()

    start_in_time_slices(run, "adapter")
