"""Return memory of this process to the operating system, and exclude objects from garbage
collection.

`discard` releases memory that is still allocated: its addresses stay valid, so C++ kernels that
hold one never point to unmapped memory. `release_freed_memory` releases freed memory that the
allocator of the C library would keep.
"""

import asyncio
import atexit
import ctypes
import functools
import gc
import mmap
import os
import sys
from typing import Any

DELAY_S = 1.0
"""Delay of `MemoryTrim`: a large request has freed its memory by then."""

_CAN_DISCARD = sys.platform == "linux"
"""Whether memory can be given back here. Other systems may keep the memory or its content."""


def can_discard() -> bool:
    """Whether `discard` works on this system."""
    return _CAN_DISCARD


def discard(address: int, num_bytes: int) -> None:
    """Release the content of allocated memory. All its bytes are 0 afterwards, and writing
    allocates it again.

    The system releases whole pages only; partial pages at both ends are zeroed and kept.

    Args:
        address: start of memory that this process has allocated and does not use meanwhile.
        num_bytes: size of the memory.

    Raises:
        OSError: the system refuses, for example because the memory is locked.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first >= end:
        ctypes.memset(address, 0, num_bytes)
        return
    ctypes.memset(address, 0, first - address)
    ctypes.memset(end, 0, address + num_bytes - end)
    if _libc().madvise(first, end - first, mmap.MADV_DONTNEED):
        error = ctypes.get_errno()
        raise OSError(
            error,
            (
                f"cannot advise the kernel about {end - first} bytes of memory (madvise): "
                f"{os.strerror(error)}"
            ),
        )


def release_freed_memory() -> bool:
    """Return freed memory to the system. Returns False if the C library cannot do that, or had
    nothing to release.
    """
    trim = getattr(_libc(), "malloc_trim", None)
    return trim is not None and bool(trim(0))


class MemoryTrim:
    """Calls `release_freed_memory` after a short delay, once for all calls of `schedule` in that
    time.
    """

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def schedule(self) -> None:
        """Schedule the release of freed memory. Call this in an event loop."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY_S, self._begin)

    def _begin(self) -> None:
        self._timer = None
        asyncio.get_running_loop().run_in_executor(None, release_freed_memory)


def keep_for_good(*, collect: bool = True) -> None:
    """Exclude all objects that are alive now from later garbage collections.

    Modules, models and tables stay until the end. A full collection that visits them would stop the
    process, and with it all streams, for a quarter of a second.

    Args:
        collect: collect garbage first, which also takes as long. Not needed after imports, which
            leave hardly any garbage.
    """
    if collect:
        gc.collect()
    gc.freeze()
    # Unfrozen at exit, when some libraries look for objects that are still allocated and print
    # them.
    atexit.register(gc.unfreeze)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if hasattr(libc, "malloc_trim"):  # only in the GNU C library
        libc.malloc_trim.argtypes, libc.malloc_trim.restype = [ctypes.c_size_t], ctypes.c_int
    return libc
