"""Return memory of this process to the operating system, move it to huge pages, and exclude objects
from garbage collection.

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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DELAY_S = 1.0
"""Delay of `MemoryTrim`: a large request has freed its memory by then."""

_CAN_DISCARD = sys.platform == "linux"
"""Whether memory can be given back here. Other systems may keep the memory or its content."""

_HUGE_PAGE_BYTES = 2 << 20
_HUGE_PAGE_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MADV_COLLAPSE = 25  # since Linux 6.1; the module mmap does not have it


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


@functools.cache
def can_use_huge_pages() -> bool:
    """Return whether this system has huge pages for memory of processes, and allows them."""
    try:
        return "[never]" not in _HUGE_PAGE_SETTING.read_text()
    except OSError:
        return False


def allocate_pages(num_bytes: int) -> mmap.mmap:
    """Allocate zeroed memory that begins at a page, in pages of 2 MiB if the system has them. The
    system commits each page when it is first written.

    A processor needs one address translation for each page that it reads. With pages of 4 KiB they
    take up to a fourth of the time in which a virtual machine reads the weights of a model.

    Returns:
        The memory, which is freed with this object.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if can_use_huge_pages():
        # Small memory too: the system joins neighbours with the same advice, and a huge page can
        # hold several of them.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def move_to_huge_pages(ranges: Iterable[tuple[int, int]]) -> None:
    """Move memory that was written to pages of 2 MiB. Its addresses and content do not change.

    Linux 6.1 or later moves the memory at once, other versions within minutes. Memory that is in
    huge pages already is not copied.

    Args:
        ranges: address and number of bytes of each. Ranges with less than 2 MiB between them are
            moved together with what is between them.
    """
    if not can_use_huge_pages():
        return
    joined: list[list[int]] = []
    for address, num_bytes in sorted(ranges):
        if joined and address - joined[-1][1] < _HUGE_PAGE_BYTES:
            joined[-1][1] = max(joined[-1][1], address + num_bytes)
        else:
            joined.append([address, address + num_bytes])
    for start, end in joined:
        # The first and the last page may reach beyond the mapping, so the system may refuse them.
        # It gets one page at a time, so it still moves the others, and no call takes long.
        first = start // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        for page in range(first, end, _HUGE_PAGE_BYTES):
            _libc().madvise(page, _HUGE_PAGE_BYTES, mmap.MADV_HUGEPAGE)
            _libc().madvise(page, _HUGE_PAGE_BYTES, _MADV_COLLAPSE)


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
