"""How far the start of an engine is: told where the work is done, heard by whoever shows it.

One listener per process. Without one, nothing happens.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

Listener = Callable[[str, int, int], None]

_listener: Listener | None = None
_imported = time.monotonic()

_MOST_BEFORE_IMPORT_S = 60.0
_STAT = Path("/proc/self/stat")
_START_TIME = 19
"""Its place among the fields of that file behind the name of the program, from 0."""


def listen(listener: Listener | None) -> None:
    """Call `listener(phase, done, total)` from now on; None stops."""
    global _listener
    _listener = listener


def report(phase: str, done: int = 0, total: int = 0) -> None:
    """Work of a phase has come to `done` of `total`; a total of 0 is not known."""
    if _listener is not None:
        _listener(phase, done, total)


def process_start() -> float:
    """When this process began, in seconds of `time.monotonic()`.

    Where the system does not tell, when this module was imported; also where that was long after,
    so that the program did something else first.
    """
    if not _STAT.is_file():
        return _imported
    # The name may hold spaces and brackets.
    fields = _STAT.read_text().rpartition(")")[2].split()
    since_boot = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot
    began = time.monotonic() - age
    return began if 0 <= _imported - began <= _MOST_BEFORE_IMPORT_S else _imported
