"""Report the progress of an engine's start to one listener per process. Without a listener, reports
are dropped.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

Listener = Callable[[str, int, int, float | None], None]

current_listener: Listener | None = None
IMPORTED = time.monotonic()

_MAX_BEFORE_IMPORT_S = 60.0
STAT = Path("/proc/self/stat")
_START_TIME = 19
"""Index of the field in that file, counted from 0 after the name of the program."""


def listen(listener: Listener | None) -> None:
    """Call `listener(phase, done, total, eta_seconds)` on every report from now on; None removes
    the listener.
    """
    global current_listener
    current_listener = listener


def report(phase: str, done: int = 0, total: int = 0, eta_seconds: float | None = None) -> None:
    """Report the progress of a phase.

    Args:
        phase: name of the phase, in words.
        done: number of finished units of the phase.
        total: number of units of the phase; 0: unknown.
        eta_seconds: estimated seconds until the engine is ready, not only until the end of this
            phase; None: unknown.
    """
    if current_listener is not None:
        current_listener(phase, done, total, eta_seconds)


def process_start() -> float:
    """Return the time at which this process started, in seconds of `time.monotonic()`.

    The time of the import of this module is returned instead if the system does not report the
    start, or if the start was long before, because the program did something else first.
    """
    if not STAT.is_file():
        return IMPORTED
    # Split after the last ")": the program name may contain spaces and brackets.
    fields = STAT.read_text().rpartition(")")[2].split()
    since_boot = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot
    began = time.monotonic() - age
    return began if 0 <= IMPORTED - began <= _MAX_BEFORE_IMPORT_S else IMPORTED
