"""Memory that the process has freed, given back to the system.

The allocator of the C library keeps what was freed for later; after one request of many megabytes
that would be held for ever.
"""

import asyncio
import ctypes
import functools
from collections.abc import Callable

DELAY_S = 1.0
"""After a large request: what it held is freed by then, and others of its kind may have come."""


class MemoryTrim:
    """Gives memory back some time after it was asked to, once for all who asked until then."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        """Give back what is free in a moment. To be called in an event loop."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY_S, self._begin)

    def _begin(self) -> None:
        self._timer = None
        asyncio.get_running_loop().run_in_executor(None, give_back_memory)


def give_back_memory() -> bool:
    """Give free memory back to the system; False where nothing could be done."""
    trim = _malloc_trim()
    return trim is not None and bool(trim(0))


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """`malloc_trim` of the GNU C library, which others do not have."""
    try:
        function = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.c_size_t], ctypes.c_int
    return function
