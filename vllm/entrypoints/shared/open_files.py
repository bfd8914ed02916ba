"""Raise the limit of open files of a process with many connections."""

import resource
from contextlib import suppress

_MOST = 2**20
"""Programs that close all possible files one by one take long with a higher limit."""


def allow_many_connections() -> None:
    """Raise the soft limit of open files, because every connection is one.

    The usual soft limit of shells is 1,024. A process may raise it up to the hard limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with suppress(ValueError, OSError):  # some systems have a lower limit than they report
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
