"""Find the files of shared memory that a test leaves.

Tests that run at the same time in other processes also create and remove such files.
"""

import contextlib
import time
from pathlib import Path

import psutil

FOLDER = Path("/dev/shm")


def named_files() -> set[str]:
    """Return the files of shared memory that this process, its children, or no process uses. Files
    that other processes use are omitted.
    """
    own = psutil.Process()
    family = {own.pid, *(child.pid for child in own.children(recursive=True))}
    used_by_others = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if int(maps.parent.name) in family:
            continue
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            lines = maps.read_text().splitlines()
            used_by_others |= {line.split()[-1] for line in lines if str(FOLDER) in line}
    return {str(path) for path in FOLDER.rglob("*")} - used_by_others


def assert_no_new_files(before: set[str]) -> None:
    """Fail if there are files that were not in `before`, an earlier result of `named_files`.

    A semaphore of another process has a name for a moment before it is opened. So a file only
    counts if it exists for 5 s.
    """
    end = time.monotonic() + 5
    new = named_files() - before
    while new and time.monotonic() < end:
        time.sleep(0.05)
        new &= named_files()
    assert not new
