"""The files of shared memory that a test leaves behind. Tests that run at the same time in other
processes have files there too, which come and go."""

import contextlib
import time
from pathlib import Path

import psutil

FOLDER = Path("/dev/shm")


def named_files() -> set[str]:
    """Return the files of shared memory that no process of another test uses: those of this
    process and its children, and those that nobody uses."""
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
    """Fail if there are files that were not there `before`, the result of `named_files`.

    A semaphore of another process has a name for a moment and is used by nobody until it is open,
    so that a file counts once it has been there for 5 s.
    """
    end = time.monotonic() + 5
    new = named_files() - before
    while new and time.monotonic() < end:
        time.sleep(0.05)
        new &= named_files()
    assert not new
